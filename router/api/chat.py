"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.chat_messages import chat_messages, fit_to_template
from router.api.chat_shape import ChatShape
from router.api.errors import bad_request
from router.api.generation import GenerationSpec, new_response_id, request_timeout_ms
from router.api.request_body import parse_body, read_body
from router.api.respond import respond
from router.api.schemas import ChatCompletionRequest
from router.api.validation import (
    ServedModel,
    check_chat_supported,
    check_prompt_token_ids,
    resolve_max_tokens,
    sampling_params,
    stop_strings,
)
from router.services import RouterServices
from text_pipeline.chat_template import ChatTemplateError
from text_pipeline.tokenizer import TokenizerError

_INLINE_TOKENIZE_CHARS = 8_192  # longer prompts are tokenized in a thread, off the event loop


async def chat_completions(services: RouterServices, request: Request) -> Response:
    """Answer one request. Raises ApiError."""
    received_at = time.perf_counter()
    data = await read_body(request, services.limits)
    body = parse_body(data, ChatCompletionRequest)
    check_chat_supported(body)
    messages = chat_messages(body.messages)
    model = services.served_model(body.model)
    timeout_ms = request_timeout_ms(request, services.limits.request_timeout_ms)
    if len(data) <= _INLINE_TOKENIZE_CHARS:
        prompt = _tokenize(services, body, messages)
    else:
        prompt = await asyncio.to_thread(_tokenize, services, body, messages)
    spec = _spec(services, body, model, prompt, timeout_ms, received_at)
    services.metrics.tokenize_time.labels("chat").observe(time.perf_counter() - received_at)
    return await respond(services, spec, request, body, ChatShape(services, body))


def _tokenize(
    services: RouterServices, body: ChatCompletionRequest, messages: list[dict[str, Any]]
) -> list[int]:
    template = services.text_model.chat_template
    if template is None:
        raise bad_request(
            f"The model {body.model!r} has no chat template; use /v1/completions.",
            "model",
            "no_chat_template",
        )
    variables = body.chat_template_kwargs or {}
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        if name in variables:
            raise bad_request(
                f"{name!r} cannot be set through 'chat_template_kwargs'.", f"chat_template_kwargs.{name}"
            )
    messages = fit_to_template(messages, template)
    try:
        return services.text_model.encode_chat(
            messages, add_generation_prompt=body.add_generation_prompt is not False, **variables
        )
    except ChatTemplateError as error:
        raise bad_request(f"The messages cannot be rendered: {error}", "messages") from error
    except TokenizerError as error:
        raise bad_request(f"The messages cannot be tokenized: {error}", "messages") from error


def _spec(
    services: RouterServices,
    body: ChatCompletionRequest,
    model: ServedModel,
    prompt: list[int],
    timeout_ms: float,
    received_at: float,
) -> GenerationSpec:
    check_prompt_token_ids(prompt, model.vocab_size, "messages")
    n = body.n or 1
    if n > services.limits.max_n:
        raise bad_request(f"'n' is {n}, but at most {services.limits.max_n} choices are allowed.", "n")
    requested = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = resolve_max_tokens(requested, None, len(prompt), model, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return GenerationSpec(
        response_id=new_response_id("chatcmpl"),
        endpoint="chat",
        model=model,
        prompts=[prompt],
        sampling=[sampling_params(body, model, max_tokens=max_tokens, logprobs=logprobs)],
        n=n,
        stop=stop_strings(body),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_in_output=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        continues_prompt_text=False,
        timeout_ms=timeout_ms,
        received_at=received_at,
    )
