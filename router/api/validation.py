"""What a valid body may ask for: unsupported features by name, and limits that need the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from cluster.sampling_params import SamplingParams
from router.api.errors import ApiError, bad_request, context_length_exceeded, unsupported
from router.api.schemas import (
    MAX_STOP_STRINGS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingFields,
)

_Number = TypeVar("_Number", int, float)

_ROLES = ("system", "developer", "user", "assistant")
_MAX_STOP_TOKEN_IDS = 128
_MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that decode workers serve now, with the limits requests must respect."""

    name: str
    fingerprint: str
    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults = OPENAI_DEFAULTS


def check_chat_supported(body: ChatCompletionRequest) -> None:
    """Raise ApiError (400) that names the first field asking for something that does not exist here."""
    _check_common_supported(body)
    if body.tools:
        raise unsupported("tools", "Tool calling is not supported.")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported(
            "tool_choice", "Tool calling is not supported: only 'none' and 'auto' are accepted."
        )
    if body.functions:
        raise unsupported("functions", "Function calling is not supported.")
    if body.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", "Function calling is not supported.")
    if body.audio is not None:
        raise unsupported("audio", "Audio output is not supported.")
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", "Only the modality 'text' is supported.")
    if body.web_search_options is not None:
        raise unsupported("web_search_options", "Web search is not supported.")
    if body.chat_template is not None:
        raise unsupported("chat_template", "A chat template of the request's own is not supported.")
    if body.echo:
        raise unsupported("echo", "'echo' is only supported by /v1/completions.")
    if body.continue_final_message:
        raise unsupported("continue_final_message", "Continuing the final message is not supported.")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")


def check_completion_supported(body: CompletionRequest) -> None:
    """The same for ``/v1/completions``."""
    _check_common_supported(body)
    if body.suffix is not None:
        raise unsupported("suffix", "Insertion before a suffix is not supported.")
    if body.prompt_embeds is not None:
        raise unsupported("prompt_embeds", "Prompts as embeddings are not supported.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"'best_of' is only supported if equal to 'n' ({body.n or 1}).")
    if body.echo and body.logprobs is not None:
        raise unsupported("logprobs", "'logprobs' together with 'echo' is not supported.")


def _check_common_supported(body: SamplingFields) -> None:
    kind = body.response_format.get("type") if isinstance(body.response_format, dict) else None
    if body.response_format is not None and kind != "text":
        raise unsupported("response_format", "Only the response format {'type': 'text'} is supported.")
    if body.use_beam_search:
        raise unsupported("use_beam_search", "Beam search is not supported.")
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"):
        if getattr(body, name) is not None:
            raise unsupported(name, "Structured output is not supported.")
    for name in ("bad_words", "allowed_token_ids"):
        if getattr(body, name):
            raise unsupported(name, f"{name!r} is not supported.")
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "Log-probabilities of the prompt are not supported.")
    if body.stream_options is not None and not body.stream:
        raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as chat templates expect it: dicts with a role and text.

    ``developer`` becomes ``system``, which is what templates know; text parts are joined by newlines.
    """
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _chat_message(message: ChatMessage, path: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise unsupported(f"{path}.role", f"Tool calling is not supported: the role {message.role!r} is not.")
    if message.role not in _ROLES:
        allowed = ", ".join(repr(role) for role in _ROLES)
        raise bad_request(f"Invalid role {message.role!r}. Allowed: {allowed}.", f"{path}.role")
    if message.tool_calls:
        raise unsupported(f"{path}.tool_calls", "Tool calling is not supported.")
    if message.function_call is not None:
        raise unsupported(f"{path}.function_call", "Function calling is not supported.")
    if message.audio is not None:
        raise unsupported(f"{path}.audio", "Audio is not supported.")
    if message.content is None:
        raise ApiError(
            400,
            f"Invalid value for '{path}.content': a string or a list of text parts is required.",
            param=f"{path}.content",
            code="missing_required_parameter",
        )
    if isinstance(message.content, str):
        content = message.content
    else:
        texts: list[str] = []
        for index, part in enumerate(message.content):
            where = f"{path}.content[{index}]"
            if part.type not in ("text", "refusal"):
                raise unsupported(
                    where, f"Content parts of type {part.type!r} are not supported, only 'text' is."
                )
            text = part.text if part.type == "text" else part.refusal
            if text is None:
                raise bad_request(f"This {part.type} part has no {part.type!r}.", f"{where}.{part.type}")
            texts.append(text)
        content = "\n".join(texts)
    rendered = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def completion_prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts as a list of strings or a list of token-id lists. Raises ApiError if there is none."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("'prompt' must not be empty.", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def check_prompt_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError (400) for an empty prompt or an id outside the vocabulary."""
    if not token_ids:
        raise bad_request(f"{param!r} must contain at least one token.", param)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise bad_request(
            f"Invalid token id {token_ids[index]} at position {index}: the model has ids 0 to "
            f"{vocab_size - 1}.",
            param,
        )


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """The stop strings, checked."""
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_request(f"At most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stop)}.", "stop")
    for index, text in enumerate(stop):
        if not text:
            raise bad_request(
                "Stop strings must not be empty.", "stop" if isinstance(body.stop, str) else f"stop[{index}]"
            )
    return tuple(stop)


def resolve_max_tokens(
    requested: int | None, default: int | None, num_prompt_tokens: int, model: ServedModel, prompt_param: str
) -> int:
    """How many tokens may be generated. ``default`` None: the rest of the context.

    Raises ApiError (400, ``context_length_exceeded``) with the numbers if the request does not fit.
    """
    room = model.max_model_len - num_prompt_tokens
    if room < 1 or (requested is not None and requested > room):
        raise context_length_exceeded(model.max_model_len, num_prompt_tokens, requested, prompt_param)
    if requested is not None:
        return requested
    return room if default is None else min(default, room)


def sampling_params(
    body: SamplingFields, model: ServedModel, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The engine's settings, with the request's seed. A seed is drawn if the body has none."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"'min_tokens' is {min_tokens}, but at most {max_tokens} tokens will be generated.", "min_tokens"
        )
    stop_token_ids = tuple(body.stop_token_ids or ())
    if len(stop_token_ids) > _MAX_STOP_TOKEN_IDS:
        raise bad_request(f"At most {_MAX_STOP_TOKEN_IDS} stop token ids are allowed.", "stop_token_ids")
    for index, token_id in enumerate(stop_token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise bad_request(
                f"Invalid token id {token_id}: the model has ids 0 to {model.vocab_size - 1}.",
                f"stop_token_ids[{index}]",
            )
    defaults = model.defaults
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=min_tokens,
        temperature=_first(body.temperature, defaults.temperature),
        top_k=max(0, _first(body.top_k, defaults.top_k)),
        top_p=_first(body.top_p, defaults.top_p),
        min_p=_first(body.min_p, defaults.min_p),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, model),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def _first(given: _Number | None, default: _Number) -> _Number:
    return default if given is None else given


def _logit_bias(raw: dict[str, float] | None, model: ServedModel) -> dict[int, float]:
    if not raw:
        return {}
    if len(raw) > _MAX_LOGIT_BIAS:
        raise bad_request(f"At most {_MAX_LOGIT_BIAS} entries are allowed, got {len(raw)}.", "logit_bias")
    bias: dict[int, float] = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10) or int(key) >= model.vocab_size:
            raise bad_request(
                f"Invalid key {key!r}: must be a token id from 0 to {model.vocab_size - 1}.",
                f"logit_bias.{key}",
            )
        bias[int(key)] = value
    return bias
