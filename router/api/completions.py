"""``POST /v1/completions``, OpenAI's legacy endpoint."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from router.api.completion_shape import CompletionShape
from router.api.errors import bad_request
from router.api.generation import GenerationSpec, new_response_id, request_timeout_ms
from router.api.request_body import parse_body, read_body
from router.api.respond import respond
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
    echo = [_text(services, prompt) for prompt in prompts] if body.echo else ()
    shape = CompletionShape(services, spec, body, echo)
    return await respond(services, spec, request, body, shape)


def _text(services: RouterServices, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else services.text_model.tokenizer.decode(prompt)


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
