"""What a valid body may ask for: unsupported features by name, and limits that need the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from cluster.sampling_params import SamplingParams
from router.api.errors import bad_request, context_length_exceeded, unsupported
from router.api.request.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
)
from router.api.request.unsupported_fields import check_extra_fields
from router.served_model import ServedModel
from text_pipeline.stop_strings import StopStrings

_Number = TypeVar("_Number", int, float)


def check_chat_supported(body: ChatCompletionRequest) -> None:
    """Raise ApiError (400) that names the first field asking for something that does not exist here."""
    _check_common_supported(body)
    _check_no_tools(body.tools, body.tool_choice, "tools", "tool_choice")
    _check_no_tools(body.functions, body.function_call, "functions", "function_call")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")


def check_completion_supported(body: CompletionRequest) -> None:
    """The same for ``/v1/completions``."""
    _check_common_supported(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"'best_of' is only supported if equal to 'n' ({body.n or 1}).")
    if body.echo and body.logprobs is not None:
        raise unsupported("logprobs", "'logprobs' together with 'echo' is not supported.")


def _check_common_supported(body: SamplingFields) -> None:
    check_extra_fields(body.model_extra)
    if body.stream_options is not None and not body.stream:
        raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")


def _check_no_tools(
    definitions: list[Any] | None, choice: Any, definitions_name: str, choice_name: str
) -> None:
    """Tools may be given where the model may not call them: it is not shown them then."""
    if choice not in (None, "none", "auto"):
        raise unsupported(
            choice_name,
            f"Tool calling is not supported: {choice_name!r} may be 'none', or 'auto' without tools.",
        )
    if definitions and choice != "none":
        raise unsupported(
            definitions_name,
            f"Tool calling is not supported: {definitions_name!r} needs {choice_name!r} to be 'none'.",
        )


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


def stop_strings(body: SamplingFields) -> StopStrings:
    """The stop strings and their automata, one for all choices. Raises ApiError (400) for an empty one."""
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    for index, text in enumerate(stop):
        if not text:
            raise bad_request(
                "Stop strings must not be empty.", "stop" if isinstance(body.stop, str) else f"stop[{index}]"
            )
    return StopStrings(stop)


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
    """The engine's settings, with the request's seed. A seed is drawn if the body has none.

    A ``top_k`` that keeps the whole vocabulary is off.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"'min_tokens' is {min_tokens}, but at most {max_tokens} tokens will be generated.", "min_tokens"
        )
    stop_token_ids = tuple(body.stop_token_ids or ())
    for index, token_id in enumerate(stop_token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise bad_request(
                f"Invalid token id {token_id}: the model has ids 0 to {model.vocab_size - 1}.",
                f"stop_token_ids[{index}]",
            )
    defaults = model.defaults
    top_k = _first(body.top_k, defaults.top_k)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=min_tokens,
        temperature=_first(body.temperature, defaults.temperature),
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
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
    bias: dict[int, float] = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10) or int(key) >= model.vocab_size:
            raise bad_request(
                f"Invalid key {key[:40]!r}: must be a token id from 0 to {model.vocab_size - 1}.",
                f"logit_bias.{key[:40]}",
            )
        bias[int(key)] = value
    return bias
