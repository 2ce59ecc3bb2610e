"""``POST /v1/completions``, OpenAI's legacy endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cluster.messages import TokenLogprobs
from router.api.choices import ChoiceDelta
from router.api.errors import bad_request
from router.api.generation import GenerationSpec, new_response_id, request_timeout_ms
from router.api.logprobs import completion_logprobs
from router.api.request_body import parse_body, read_body
from router.api.respond import FinishedChoice, respond
from router.api.schemas import CompletionRequest
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
from text_pipeline.detokenizer import IncrementalDetokenizer
from text_pipeline.tokenizer import TokenizerError

_INLINE_TOKENIZE_CHARS = 8_192  # longer prompts are tokenized in a thread, off the event loop
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(services: RouterServices, request: Request) -> Response:
    """Answer one request. Raises ApiError."""
    received_at = time.perf_counter()
    data = await read_body(request, services.limits.max_request_body)
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
    return await respond(services, spec, request, body, _CompletionShape(services, spec, body, prompts))


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
    """Writes the choices of one completion request."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        services: RouterServices,
        spec: GenerationSpec,
        body: CompletionRequest,
        prompts: list[str] | list[list[int]],
    ) -> None:
        self._spec = spec
        self._tokenizer = services.text_model.tokenizer
        self._num_top = body.logprobs
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}  # by choice: where its next token begins
        self._echo: list[str] | None = None
        if body.echo:
            self._echo = [
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt) for prompt in prompts
            ]

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        """A choice of the whole ``text_completion``."""
        return {
            "index": index,
            "text": self._echo_of(index) + choice.text,
            "logprobs": self._logprobs(index, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed."""
        return None if self._echo is None else _chunk_choice(index, self._echo_of(index))

    def pieces(self, index: int, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """The text, and the end in a chunk of its own."""
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs is not None:
            yield _chunk_choice(index, delta.text, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield _chunk_choice(index, "", finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        detokenizer = self._detokenizers.get(index)
        if detokenizer is None:
            detokenizer = self._detokenizers[index] = IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=self._spec.skip_special_tokens,
                prompt_token_ids=self._spec.text_before(index),
            )
        return completion_logprobs(positions, self._num_top, self._tokenizer, detokenizer)

    def _echo_of(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index // self._spec.n]


def _chunk_choice(index: int, text: str, **fields: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **fields}
