"""How a chat template takes the tool calls of a conversation, found out by rendering one.

Templates differ: some print the arguments with ``tojson`` and want an object, some paste the JSON text; some
look for the calls only where the message has no content; many know no tools and drop them without a word.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text_pipeline.chat_template import ChatTemplate, ChatTemplateError

_NAME, _KEY, _VALUE, _RESULT = "leadoutname", "leadoutkey", "leadoutvalue", "leadoutresult"
_PYTHON_OR_ESCAPED = re.compile(rf"""'{_KEY}'\s*:|\\+"{_KEY}""")  # an object or a text printed the wrong way


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """The form in which a template renders tool calls as the model has learned them."""

    arguments_as_text: bool = False
    content_is_null: bool = False  # where the message has nothing but tool calls; otherwise its content is ""


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a template renders; None or False: it would drop it, or refuses it."""

    calls: ToolCallStyle | None  # in a message without text
    calls_with_text: ToolCallStyle | None  # in a message that has text too
    results: bool
    why: str  # ": ..." where the template itself says why not, otherwise ""


_STYLES = (
    ToolCallStyle(),
    ToolCallStyle(arguments_as_text=True),
    ToolCallStyle(content_is_null=True),
    ToolCallStyle(arguments_as_text=True, content_is_null=True),
)


@functools.lru_cache(maxsize=8)
def tool_support(template: ChatTemplate) -> ToolSupport:
    """What ``template`` renders of tool calls and their results. Renders a few short conversations, once."""
    errors: list[str] = []
    calls = _style(template, "", errors)
    with_text = _style(template, "leadouttext", errors)
    style = calls or with_text
    results = style is not None and _RESULT in (_render(template, "", style, errors) or "")
    is_complete = calls is not None and with_text is not None and results
    return ToolSupport(calls, with_text, results, "" if is_complete or not errors else f": {errors[0]}")


def fit_tool_calls(message: Mapping[str, Any], style: ToolCallStyle) -> dict[str, Any]:
    """An assistant's message with tool calls, whose arguments are objects, in the form of ``style``."""
    fitted = dict(message)
    if style.content_is_null and not message["content"]:
        fitted["content"] = None
    if style.arguments_as_text:
        fitted["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
    return fitted


def _style(template: ChatTemplate, text: str, errors: list[str]) -> ToolCallStyle | None:
    for style in _STYLES:
        rendered = _render(template, text, style, errors)
        if (
            rendered is not None
            and all(marker in rendered for marker in (_NAME, _KEY, _VALUE))
            and not _PYTHON_OR_ESCAPED.search(rendered)
        ):
            return style
    return None


def _render(template: ChatTemplate, text: str, style: ToolCallStyle, errors: list[str]) -> str | None:
    # The id is what the strictest templates want: nine letters and digits.
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    call = {"id": "call00001", "type": "function", "function": function}
    assistant = {"role": "assistant", "content": text, "tool_calls": [call]}
    try:
        return template.render(
            [
                {"role": "user", "content": "question"},
                fit_tool_calls(assistant, style),
                {"role": "tool", "content": _RESULT, "tool_call_id": "call00001", "name": _NAME},
            ]
        )
    except ChatTemplateError as error:
        errors.append(str(error))
        return None
