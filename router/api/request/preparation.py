"""From a body's bytes to what is to be generated: parse, check, render, tokenize, hash.

All of it grows with the body. These functions run where they are called, which for a body that is not small
is another process; so they take data and return data, and know nothing of the router around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from cluster.sampling_params import SamplingParams
from router.api.errors import ApiError, bad_request, context_length_exceeded, model_not_found
from router.api.request.body_limits import BodyLimits, check_counts, check_request_tokens
from router.api.request.chat_messages import chat_messages, fit_to_template
from router.api.request.generation_spec import GenerationSpec, new_response_id, worker_request_id
from router.api.request.json_body import parse_body
from router.api.request.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from router.api.request.validation import (
    check_chat_supported,
    check_completion_supported,
    check_prompt_token_ids,
    completion_prompts,
    resolve_max_tokens,
    sampling_params,
    stop_strings,
)
from router.served_model import ServedModel
from router.state.prompt_hashes import PromptHashes
from text_pipeline.chat_template import ChatTemplateError
from text_pipeline.text_model import TextModel
from text_pipeline.tokenizer import TokenizerError

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_TEMPLATE_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "self",
    "bos_token",
    "eos_token",
)  # what a request may not set

BodyT = TypeVar("BodyT", bound=SamplingFields)


@dataclass(frozen=True, kw_only=True)
class PreparationContext:
    """All that a preparation knows of the router: a snapshot, which may go to another process."""

    request_id: str  # the API request's: the client's own, or one that was made up
    models: Mapping[str, ServedModel | ApiError]  # by name; or why one cannot be served now
    limits: BodyLimits
    timeout_ms: float
    received_at: float  # monotonic seconds of the router's clock

    def served_model(self, name: str) -> ServedModel:
        """The limits of the model ``name``. Raises ApiError: 404 if unknown, 503 if not ready."""
        model = self.models.get(name)
        if model is None:
            raise model_not_found(name, list(self.models))
        if isinstance(model, ApiError):
            raise model
        return model


@dataclass(frozen=True)
class Prepared(Generic[BodyT]):
    """``spec`` and what shapes the answer: the body without its contents, and the texts to echo, if any."""

    spec: GenerationSpec
    body: BodyT
    echo: tuple[str, ...] = ()


def prepare_chat(
    text_models: Mapping[str, TextModel], context: PreparationContext, data: bytes
) -> Prepared[ChatCompletionRequest]:
    """Prepare ``POST /v1/chat/completions``. Raises ApiError."""
    body = parse_body(data, ChatCompletionRequest, lambda raw: _check_counts(raw, context))
    check_chat_supported(body)
    messages = chat_messages(body.messages)
    model = context.served_model(body.model)
    prompt = _encode_chat(text_models[model.name], body, messages, model)
    check_prompt_token_ids(prompt, model.vocab_size, "messages")
    requested = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = resolve_max_tokens(requested, None, len(prompt), model, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_params(body, model, max_tokens=max_tokens, logprobs=logprobs)
    spec = _spec("chat", body, context, model, [prompt], [sampling])
    return Prepared(spec, without_contents(body))


def prepare_completion(
    text_models: Mapping[str, TextModel], context: PreparationContext, data: bytes
) -> Prepared[CompletionRequest]:
    """Prepare ``POST /v1/completions``. Raises ApiError."""
    body = parse_body(data, CompletionRequest, lambda raw: _check_counts(raw, context))
    check_completion_supported(body)
    prompts = completion_prompts(body)
    model = context.served_model(body.model)
    text_model = text_models[model.name]
    token_ids = _encode_prompts(text_model, body, prompts, model)
    sampling = []
    for index, prompt in enumerate(token_ids):
        param = _prompt_param(index, len(prompts))
        check_prompt_token_ids(prompt, model.vocab_size, param)
        max_tokens = resolve_max_tokens(
            body.max_tokens, _DEFAULT_COMPLETION_TOKENS, len(prompt), model, param
        )
        sampling.append(sampling_params(body, model, max_tokens=max_tokens, logprobs=body.logprobs))
    spec = _spec("completions", body, context, model, token_ids, sampling)
    echo = [
        prompt if isinstance(prompt, str) else text_model.tokenizer.decode(prompt)
        for prompt in (prompts if body.echo else ())
    ]
    return Prepared(spec, without_contents(body), tuple(echo))


def without_contents(body: BodyT) -> BodyT:
    """``body`` with its flags and numbers only: it goes to a process where nothing large may be unpacked."""
    kept: dict[str, Any] = {}
    for name in type(body).model_fields:
        value = getattr(body, name)
        if name in body.model_fields_set and isinstance(value, bool | int | float | BaseModel):
            kept[name] = value
    return type(body).model_construct(None, **kept)


def _spec(
    endpoint: Literal["chat", "completions"],
    body: SamplingFields,
    context: PreparationContext,
    model: ServedModel,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
) -> GenerationSpec:
    is_chat = endpoint == "chat"
    response_id = new_response_id("chatcmpl" if is_chat else "cmpl")
    return GenerationSpec(
        response_id=response_id,
        request_id=worker_request_id(context.request_id, response_id),
        endpoint=endpoint,
        model=model,
        prompts=prompts,
        hashes=[_hashes(prompt, body, model) for prompt in prompts],
        sampling=sampling,
        n=_num_choices(body, context.limits),
        stop_strings=stop_strings(body),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_in_output=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        continues_prompt_text=not is_chat,
        timeout_ms=context.timeout_ms,
        received_at=context.received_at,
    )


def _check_counts(raw: dict[str, Any], context: PreparationContext) -> None:
    name = raw.get("model")
    model = context.models.get(name) if isinstance(name, str) else None
    check_counts(raw, context.limits, model.max_model_len if isinstance(model, ServedModel) else None)


def _num_choices(body: SamplingFields, limits: BodyLimits) -> int:
    n = body.n or 1
    if n > limits.max_n:
        raise bad_request(f"'n' is {n}, but at most {limits.max_n} choices are allowed.", "n")
    return n


def _hashes(prompt: list[int], body: SamplingFields, model: ServedModel) -> PromptHashes:
    hashes = PromptHashes(prompt, body.cache_salt or "")
    for group in model.hash_groups:
        hashes.of(group)
    return hashes


def _encode_chat(
    text_model: TextModel, body: ChatCompletionRequest, messages: list[dict[str, Any]], model: ServedModel
) -> list[int]:
    template = text_model.chat_template
    if template is None:
        raise bad_request(
            f"The model {body.model!r} has no chat template; use /v1/completions.",
            "model",
            "no_chat_template",
        )
    variables = body.chat_template_kwargs or {}
    for name in _TEMPLATE_VARIABLES:
        if name in variables:
            raise bad_request(
                f"{name!r} cannot be set through 'chat_template_kwargs'.", f"chat_template_kwargs.{name}"
            )
    messages = fit_to_template(messages, template)
    try:
        rendered = text_model.render_chat(
            messages, add_generation_prompt=body.add_generation_prompt is not False, **variables
        )
        _check_fits(text_model, rendered.text, model, "messages")
        return rendered.encode()
    except ChatTemplateError as error:
        raise bad_request(f"The messages cannot be rendered: {error}", "messages") from error
    except TokenizerError as error:
        raise bad_request(f"The messages cannot be tokenized: {error}", "messages") from error


def _encode_prompts(
    text_model: TextModel,
    body: CompletionRequest,
    prompts: Sequence[str] | Sequence[list[int]],
    model: ServedModel,
) -> list[list[int]]:
    """A raw prompt may spell special tokens, as in other engines: its author writes the template."""
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            _check_fits(text_model, prompt, model, _prompt_param(index, len(prompts)))
    encoded: list[list[int]] = []
    num_tokens = 0
    for prompt in prompts:
        try:
            encoded.append(
                text_model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
                if isinstance(prompt, str)
                else prompt
            )
        except TokenizerError as error:
            raise bad_request(f"The prompt cannot be tokenized: {error}", "prompt") from error
        num_tokens += len(encoded[-1])
        if len(prompts) > 1:
            check_request_tokens(num_tokens, model.max_model_len, "prompt")
    return encoded


def _check_fits(text_model: TextModel, text: str, model: ServedModel, param: str) -> None:
    """Refuse a text that has more bytes than the context's tokens could stand for, before it is tokenized."""
    least = text_model.min_token_count.of(text)
    if least >= model.max_model_len:
        raise context_length_exceeded(model.max_model_len, least, None, param, is_least=True)


def _prompt_param(index: int, num_prompts: int) -> str:
    return "prompt" if num_prompts == 1 else f"prompt[{index}]"
