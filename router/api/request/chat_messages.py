"""The conversation of a chat request as chat templates expect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.api.errors import ApiError, bad_request, unsupported
from router.api.request.schemas import ChatMessage, ContentPart, FunctionCall, ToolCall
from text_pipeline.chat_template import ChatTemplate
from text_pipeline.tool_messages import fit_tool_calls, tool_support

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHOWN = 40  # characters of a wrong value


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Dicts with a role and text, one for each message. Raises ApiError (400) with the path of what is wrong.

    ``developer`` becomes ``system``, which is what templates know, ``function`` and ``function_call`` become
    ``tool`` and ``tool_calls``. Text parts are joined by newlines, and a refusal is what the assistant said.
    The arguments of tool calls become objects; a tool's result gets the name of the function that was called.
    """
    rendered: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # tool call id → function, so far
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role not in _ROLES:
            allowed = ", ".join(repr(role) for role in _ROLES)
            raise bad_request(f"Invalid role {message.role[:_SHOWN]!r}. Allowed: {allowed}.", f"{path}.role")
        if message.role in ("tool", "function"):
            rendered.append(_tool_result(message, path, called))
            continue
        if message.role == "assistant":
            rendered.append(_assistant_message(message, path, called))
        else:
            _refuse_assistants_fields(message, path)
            content = _content(message, path)
            rendered.append(
                {"role": "system" if message.role == "developer" else message.role, "content": content}
            )
        if message.name is not None:
            rendered[-1]["name"] = message.name
    return rendered


def fit_to_template(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Tool calls in the form that ``template`` renders.

    Raises ApiError (400) where it would drop a tool call or a result without a word.
    """
    if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return messages
    support = tool_support(template)
    fitted = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message["role"] == "tool" and not support.results:
            raise unsupported(
                path, f"The chat template of this model does not render tool results{support.why}."
            )
        if "tool_calls" in message:
            style = support.calls_with_text if message["content"] else support.calls
            if style is None:
                with_text = " beside text" if support.calls is not None else ""
                raise unsupported(
                    f"{path}.tool_calls",
                    f"The chat template of this model does not render tool calls{with_text}{support.why}.",
                )
            message = fit_tool_calls(message, style)
        fitted.append(message)
    return fitted


def _assistant_message(message: ChatMessage, path: str, called: dict[str, str]) -> dict[str, Any]:
    if message.audio is not None:
        raise unsupported(f"{path}.audio", "Audio is not supported.")
    if message.tool_call_id is not None:
        raise bad_request("Only tool results have a 'tool_call_id'.", f"{path}.tool_call_id")
    text = "" if message.content is None else _text(message.content, path)
    if message.refusal:
        text = f"{text}\n{message.refusal}" if text else message.refusal
    rendered: dict[str, Any] = {"role": "assistant", "content": text}
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    calls = [
        _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        if calls:
            raise bad_request("'function_call' and 'tool_calls' exclude each other.", f"{path}.function_call")
        call_id = f"call{len(called):05d}"
        calls = [_call(call_id, message.function_call, f"{path}.function_call")]
    ids: set[str] = set()
    for index, call in enumerate(calls):
        if call["id"] in ids:
            raise bad_request(
                f"The tool call id {call['id'][:_SHOWN]!r} is used twice.", f"{path}.tool_calls[{index}].id"
            )
        ids.add(call["id"])
    called.update({call["id"]: call["function"]["name"] for call in calls})
    if calls:
        rendered["tool_calls"] = calls
    return rendered


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise unsupported(f"{path}.type", f"Tool calls of type {call.type[:_SHOWN]!r} are not supported.")
    if call.function is None:
        raise _missing(f"{path}.function", "the function that was called")
    if not call.id:
        raise _missing(f"{path}.id", "the id that the tool's result refers to")
    return _call(call.id, call.function, f"{path}.function")


def _call(call_id: str, function: FunctionCall, path: str) -> dict[str, Any]:
    arguments: Any = function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"The arguments are not valid JSON: {error}", f"{path}.arguments") from error
    if not isinstance(arguments, dict):
        raise bad_request("The arguments must be the text of a JSON object.", f"{path}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _tool_result(message: ChatMessage, path: str, called: dict[str, str]) -> dict[str, Any]:
    _refuse_assistants_fields(message, path)
    if message.role == "tool":
        call_id, where = message.tool_call_id, f"{path}.tool_call_id"
        if not call_id:
            raise _missing(where, "the id of the tool call that this is the result of")
    else:
        where = f"{path}.name"
        if not message.name:
            raise _missing(where, "the function that this is the result of")
        call_id = next((one for one, name in reversed(called.items()) if name == message.name), None)
    if call_id is None or call_id not in called:
        raise bad_request("No earlier assistant message has this tool call.", where)
    return {
        "role": "tool",
        "content": _content(message, path),
        "tool_call_id": call_id,
        "name": message.name or called[call_id],
    }


def _refuse_assistants_fields(message: ChatMessage, path: str) -> None:
    for name in ("tool_calls", "function_call", "refusal", "audio"):
        if getattr(message, name):
            raise bad_request(f"Only assistant messages have {name!r}.", f"{path}.{name}")
    if message.tool_call_id is not None and message.role != "tool":
        raise bad_request("Only tool results have a 'tool_call_id'.", f"{path}.tool_call_id")


def _content(message: ChatMessage, path: str) -> str:
    if message.content is None:
        raise _missing(f"{path}.content", "a string or a list of text parts")
    return _text(message.content, path)


def _text(content: str | list[ContentPart], path: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}.content[{index}]"
        if part.type not in ("text", "refusal"):
            raise unsupported(
                where, f"Content parts of type {part.type[:_SHOWN]!r} are not supported, only 'text' is."
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_request(f"This {part.type} part has no {part.type!r}.", f"{where}.{part.type}")
        texts.append(text)
    return "\n".join(texts)


def _missing(path: str, what: str) -> ApiError:
    return ApiError(
        400,
        f"Invalid value for {path!r}: {what} is required.",
        param=path,
        code="missing_required_parameter",
    )
