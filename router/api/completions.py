"""``POST /v1/completions``, OpenAI's legacy endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.errors import bad_request
from router.api.generation import ActiveGeneration, GenerationSpec, new_response_id, request_timeout_ms
from router.api.logprobs import completion_logprobs
from router.api.request_body import parse_body, read_body
from router.api.respond import Deltas, FinishedChoice, respond
from router.api.schemas import CompletionRequest
from router.api.streaming import DONE, sse_event
from router.api.validation import (
    ServedModel,
    check_completion_supported,
    check_prompt_token_ids,
    completion_prompts,
    resolve_max_tokens,
    sampling_params,
    stop_strings,
)
from router.services import RouterServices
from text_pipeline.tokenizer import TokenizerError

_INLINE_TOKENIZE_CHARS = 8_192  # longer prompts are tokenized in a thread, off the event loop
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(services: RouterServices, request: Request) -> Response:
    """Answer one request. Raises ApiError."""
    received_at = time.perf_counter()
    data = await read_body(request, services.limits)
    body = parse_body(data, CompletionRequest)
    check_completion_supported(body)
    prompts = completion_prompts(body)
    model = services.served_model(body.model)
    timeout_ms = request_timeout_ms(request, services.limits.request_timeout_ms)
    if len(data) <= _INLINE_TOKENIZE_CHARS:
        token_ids = _tokenize(services, body, prompts)
    else:
        token_ids = await asyncio.to_thread(_tokenize, services, body, prompts)
    spec = _spec(services, body, model, token_ids, timeout_ms, received_at)
    services.metrics.tokenize_time.labels("completions").observe(time.perf_counter() - received_at)
    shape = _CompletionShape(services, body, prompts)
    return await respond(
        services, spec, request, stream=bool(body.stream), events=shape.events, body=shape.body
    )


def _tokenize(
    services: RouterServices, body: CompletionRequest, prompts: list[str] | list[list[int]]
) -> list[list[int]]:
    add_special_tokens = body.add_special_tokens is not False
    tokenizer = services.text_model.tokenizer
    try:
        return [
            tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
    except TokenizerError as error:
        raise bad_request(f"The prompt cannot be tokenized: {error}", "prompt") from error


def _spec(
    services: RouterServices,
    body: CompletionRequest,
    model: ServedModel,
    prompts: list[list[int]],
    timeout_ms: float,
    received_at: float,
) -> GenerationSpec:
    n = body.n or 1
    if n > services.limits.max_n:
        raise bad_request(f"'n' is {n}, but at most {services.limits.max_n} choices are allowed.", "n")
    sampling = []
    for index, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        check_prompt_token_ids(prompt, model.vocab_size, param)
        max_tokens = resolve_max_tokens(body.max_tokens, _DEFAULT_MAX_TOKENS, len(prompt), model, param)
        sampling.append(sampling_params(body, model, max_tokens=max_tokens, logprobs=body.logprobs))
    return GenerationSpec(
        response_id=new_response_id("cmpl"),
        endpoint="completions",
        model=model,
        prompts=prompts,
        sampling=sampling,
        n=n,
        stop=stop_strings(body),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_in_output=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        continues_prompt_text=True,
        timeout_ms=timeout_ms,
        received_at=received_at,
    )


class _CompletionShape:
    """Builds the response objects of one completion request."""

    def __init__(
        self, services: RouterServices, body: CompletionRequest, prompts: list[str] | list[list[int]]
    ) -> None:
        self._tokenizer = services.text_model.tokenizer
        self._num_top = body.logprobs
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._echo: list[str] | None = None
        if body.echo:
            self._echo = [
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt) for prompt in prompts
            ]

    def body(self, active: ActiveGeneration, choices: list[FinishedChoice]) -> dict[str, Any]:
        """The whole ``text_completion``."""
        return {
            **_envelope(active.spec),
            "choices": [
                {
                    "index": index,
                    "text": self._echo_of(active, index) + choice.text,
                    "logprobs": (
                        completion_logprobs(choice.logprobs, self._num_top, self._tokenizer, 0)
                        if self._num_top is not None
                        else None
                    ),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": active.usage.body(),
        }

    async def events(self, active: ActiveGeneration, deltas: Deltas) -> AsyncIterator[bytes]:
        """The ``text_completion`` chunks."""
        envelope = _envelope(active.spec)
        if self._include_usage:
            envelope["usage"] = None

        def chunk(index: int, text: str, **fields: Any) -> bytes:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **fields}
            return sse_event({**envelope, "choices": [choice]})

        text_offsets = [0] * active.spec.num_choices
        if self._echo is not None:
            for index in range(active.spec.num_choices):
                yield chunk(index, self._echo_of(active, index))
        async for batch in deltas:
            for index, delta in batch:
                logprobs: dict[str, Any] | None = None
                if self._num_top is not None and delta.logprobs:
                    logprobs = completion_logprobs(
                        delta.logprobs, self._num_top, self._tokenizer, text_offsets[index]
                    )
                    text_offsets[index] += sum(len(token) for token in logprobs["tokens"])
                if delta.text or logprobs is not None:
                    yield chunk(index, delta.text, logprobs=logprobs)
                if delta.finish_reason is not None:
                    yield chunk(index, "", finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if self._include_usage:
            yield sse_event({**envelope, "choices": [], "usage": active.usage.body()})
        yield DONE

    def _echo_of(self, active: ActiveGeneration, index: int) -> str:
        return "" if self._echo is None else self._echo[index // active.spec.n]


def _envelope(spec: GenerationSpec) -> dict[str, Any]:
    return {
        "id": spec.response_id,
        "object": "text_completion",
        "created": spec.created,
        "model": spec.model.name,
        "system_fingerprint": spec.system_fingerprint,
    }
