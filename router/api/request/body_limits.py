"""How much a body may hold, counted before its schema looks at each part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.settings import RouterConfig
from router.api.errors import ApiError, bad_request, context_length_exceeded

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = (
    1024  # of UTF-8, each: every sequence follows every stop string, character by character
)
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOOLS = 128
_MIN_REQUEST_TOKENS = 262_144


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Bounds on the numbers of things in one body; the settings ``router.*`` of the same names."""

    max_messages: int
    max_content_parts: int
    max_prompts: int
    max_n: int


def body_limits(config: RouterConfig) -> BodyLimits:
    """The configured bounds."""
    return BodyLimits(
        max_messages=config.max_messages,
        max_content_parts=config.max_content_parts,
        max_prompts=config.max_prompts,
        max_n=config.max_n,
    )


def max_request_tokens(max_model_len: int) -> int:
    """Most tokens of all prompts of one request together."""
    return max(max_model_len, _MIN_REQUEST_TOKENS)


def check_counts(body: dict[str, Any], limits: BodyLimits, max_model_len: int | None) -> None:
    """Raise ApiError (400) with field, number and limit where ``body`` holds too many of something.

    ``body`` is decoded JSON of any shape; what has the wrong type is left to the schema. ``max_model_len`` is
    None where no model can be served at the moment.
    """
    _check_messages(body.get("messages"), limits)
    _check_prompts(body.get("prompt"), limits, max_model_len)
    _check_stop_strings(body.get("stop"))
    for name, limit in (
        ("stop_token_ids", MAX_STOP_TOKEN_IDS),
        ("logit_bias", MAX_LOGIT_BIAS),
        ("tools", MAX_TOOLS),
        ("functions", MAX_TOOLS),
    ):
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise _too_many(name, len(value), limit)


def check_request_tokens(num_tokens: int, max_model_len: int, param: str) -> None:
    """Raise ApiError (400) where the prompts of one request have too many tokens together."""
    limit = max_request_tokens(max_model_len)
    if num_tokens > limit:
        raise bad_request(
            f"The prompts of one request may have {limit} tokens together, and these have at least "
            f"{num_tokens}. Please send several requests.",
            param,
        )


def _check_messages(messages: object, limits: BodyLimits) -> None:
    if not isinstance(messages, list):
        return
    if len(messages) > limits.max_messages:
        raise _too_many("messages", len(messages), limits.max_messages, "router.max_messages")
    num_parts = sum(
        len(value)
        for message in messages
        if isinstance(message, dict)
        for value in message.values()
        if isinstance(value, list)
    )
    if num_parts > limits.max_content_parts:
        raise _too_many(
            "messages", num_parts, limits.max_content_parts, "router.max_content_parts", what="content parts"
        )


def _check_prompts(prompt: object, limits: BodyLimits, max_model_len: int | None) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    if not isinstance(prompt[0], str | list):
        _check_token_ids(prompt, max_model_len, "prompt")
        return
    if len(prompt) > limits.max_prompts:
        raise _too_many("prompt", len(prompt), limits.max_prompts, "router.max_prompts", what="prompts")
    num_tokens = 0
    for index, one in enumerate(prompt):
        if isinstance(one, list):
            _check_token_ids(one, max_model_len, f"prompt[{index}]")
            num_tokens += len(one)
    if max_model_len is not None:
        check_request_tokens(num_tokens, max_model_len, "prompt")


def _check_token_ids(token_ids: Sequence[object], max_model_len: int | None, param: str) -> None:
    if max_model_len is not None and len(token_ids) >= max_model_len:
        raise context_length_exceeded(max_model_len, len(token_ids), None, param)


def _check_stop_strings(stop: object) -> None:
    strings = stop if isinstance(stop, list) else [stop]
    if len(strings) > MAX_STOP_STRINGS:
        raise _too_many("stop", len(strings), MAX_STOP_STRINGS, what="stop strings")
    for index, text in enumerate(strings):
        if not isinstance(text, str):
            continue
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > MAX_STOP_STRING_BYTES:
            raise bad_request(
                f"A stop string may have {MAX_STOP_STRING_BYTES} bytes, and this has {num_bytes}.",
                f"stop[{index}]" if isinstance(stop, list) else "stop",
            )


def _too_many(param: str, number: int, limit: int, setting: str = "", *, what: str = "") -> ApiError:
    counted = what or f"entries of {param!r}"
    where = f" ({setting})" if setting else ""
    return bad_request(f"At most {limit} {counted} are allowed{where}, got {number}.", param)
