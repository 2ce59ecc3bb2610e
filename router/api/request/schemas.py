"""The request bodies of the API. Unknown fields are tolerated, because clients grow new ones.

They are kept, so that ``unsupported_fields`` can refuse by name those that mean something to other servers,
instead of answering as if they had not been there.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)

MAX_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 20

# What JSON allows and no message between processes could carry is refused here.
_MAX_INT64 = 2**63 - 1
_Int64 = Annotated[int, Field(ge=-(2**63), le=_MAX_INT64)]
_Count = Annotated[int, Field(ge=0, le=_MAX_INT64)]
_PositiveCount = Annotated[int, Field(ge=1, le=_MAX_INT64)]
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


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


class FunctionCall(_Body):
    """A function that the assistant called; ``arguments`` is the text of a JSON object."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any]


class ToolCall(_Body):
    """One of the assistant's tool calls in the history."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatMessage(_Body):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None  # an assistant's, instead of content
    reasoning_content: str | None = None  # an assistant's, for templates that know it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # deprecated by OpenAI, as is the role ``function``
    audio: Any = None


class SamplingFields(_Body):
    """What both endpoints share: OpenAI's sampling fields and vLLM's extensions."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _PositiveCount | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    stop: str | list[str] | None = None
    seed: _Int64 | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None = None
    # vLLM's extensions
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_Int64], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: _Int64 | None = None
    # without effect, see ``unsupported_fields.IGNORED``
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ChatCompletionRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: _PositiveCount | None = None
    max_completion_tokens: _PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted where the model may not use them
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None


# One bad token id must not cost an error per element and branch.
_Strings = Annotated[list[str], Field(fail_fast=True)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]
_TokenIdLists = Annotated[list[_TokenIds], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | _Strings | _TokenIds | _TokenIdLists
    max_tokens: _PositiveCount | None = None
    best_of: _PositiveCount | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
