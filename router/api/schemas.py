"""The request bodies of the API. Unknown fields are tolerated, because clients grow new ones.

Fields for features that do not exist here are declared all the same, so that ``validation`` can refuse them
by name instead of answering as if they had not been there.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 20

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """``stream_options`` of both endpoints."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's extension


class ContentPart(_Body):
    """One part of a message's content. Only text parts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(_Body):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None


class SamplingFields(_Body):
    """What both endpoints share: OpenAI's sampling fields and vLLM's extensions."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: str | list[str] | None = None
    seed: _Int64 | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    # vLLM's extensions
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    # not supported
    response_format: Any = None
    use_beam_search: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    bad_words: list[Any] | None = None
    prompt_logprobs: Any = None
    allowed_token_ids: list[Any] | None = None


class ChatCompletionRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # not supported
    chat_template: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    echo: bool | None = None


# One bad token id must not cost an error per element and branch.
_Strings = Annotated[list[str], Field(fail_fast=True)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]
_TokenIdLists = Annotated[list[_TokenIds], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | _Strings | _TokenIds | _TokenIdLists
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    # not supported
    suffix: str | None = None
    prompt_embeds: Any = None
