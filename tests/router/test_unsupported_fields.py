"""Fields of other servers: refused by name, or accepted where they ask for nothing."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat

from router.api.errors import ApiError
from router.api.request.schemas import ChatCompletionRequest, CompletionRequest, StreamOptions
from router.api.request.unsupported_fields import IGNORED, UNSUPPORTED, check_extra_fields
from router.api.request.validation import check_chat_supported, check_completion_supported
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import EOS, answer
from tests.router.test_chat_api import QUESTION, MakeWorker

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
NAMES = [name for group in UNSUPPORTED for name in (*group.names, *group.neutral)]
NEUTRAL = [
    (name, value) for group in UNSUPPORTED for name, values in group.neutral.items() for value in values
]

# A value that asks for something, for the fields of the peers that must never be dropped silently.
ASKING: dict[str, Any] = {
    "store": True,
    "service_tier": "flex",
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
    "reasoning_effort": "high",
    "moderation": {},
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "response_format": {"type": "json_object"},
    "truncate_prompt_tokens": 5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "detokenize": False,
    "guided_json": {},
    "structured_outputs": {"json": {}},
    "use_beam_search": True,
    "length_penalty": 2,
    "early_stopping": True,
    "prompt_logprobs": 0,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "logits_processors": ["x"],
    "mm_processor_kwargs": {},
    "documents": [{"title": "t", "text": "x"}],
    "chat_template": "{{ messages }}",
    "continue_final_message": True,
    "spaces_between_special_tokens": False,
    "include_reasoning": False,
    "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"a": 1},
    "request_id": "mine",
    "regex": "a+",
    "ebnf": "root ::= 'a'",
    "json_schema": "{}",
    "lora_path": "adapter",
    "custom_params": {},
    "custom_logit_processor": "x",
    "stream_reasoning": False,
    "separate_reasoning": False,
    "return_hidden_states": True,
    "rid": "mine",
    "session_params": {"id": "s"},
    "no_stop_trim": True,
    "bootstrap_room": 7,
    "thinking": {"type": "enabled"},
    "nvext": {"greed_sampling": True},
    "disaggregated_params": {},
    "mirostat": 2,
    "cache_prompt": False,
}


@pytest.mark.parametrize(("name", "value"), ASKING.items(), ids=list(ASKING))
def test_what_does_not_exist_here_is_refused_by_name(name: str, value: Any) -> None:
    for schema, check, body in (
        (ChatCompletionRequest, check_chat_supported, CHAT),
        (CompletionRequest, check_completion_supported, {"model": "m", "prompt": "p"}),
    ):
        request = schema.model_validate({**body, name: value})
        with pytest.raises(ApiError) as error:
            check(request)  # type: ignore[operator]
        assert (error.value.status, error.value.param) == (400, name)
        assert error.value.code == "unsupported_parameter"
        assert repr(name) in error.value.message


@pytest.mark.parametrize(("name", "value"), [*NEUTRAL, *((name, None) for name in NAMES)])
def test_what_asks_for_nothing_may_stay(name: str, value: Any) -> None:
    check_extra_fields({name: value})


def test_a_truth_value_is_no_number_and_a_number_is_no_truth_value() -> None:
    for extra in ({"store": 0}, {"detokenize": 1}, {"length_penalty": True}):
        with pytest.raises(ApiError):
            check_extra_fields(extra)
    check_extra_fields({"length_penalty": 1, "mirostat": 0.0, "response_format": {"type": "text", "x": 1}})


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(ApiError, match=r"set it to \"auto\" or \"default\"\."):
        check_extra_fields({"service_tier": "flex"})
    with pytest.raises(ApiError, match=r"Leave it out\."):
        check_extra_fields({"prediction": {}})


def test_no_field_is_named_twice_and_what_is_ignored_is_in_the_schemas() -> None:
    assert len(NAMES) == len(set(NAMES))
    for name in IGNORED:
        schema, _, field = name.rpartition(".")
        fields = StreamOptions.model_fields if schema else ChatCompletionRequest.model_fields
        assert field in fields
        assert name not in NAMES


@pytest.mark.parametrize(
    ("schema", "openai"),
    [(ChatCompletionRequest, openai_chat), (CompletionRequest, openai_completions)],
    ids=["chat", "completions"],
)
def test_every_field_of_openai_s_client_is_known(schema: Any, openai: Any) -> None:
    assert set(openai.CompletionCreateParamsBase.__annotations__) <= {*schema.model_fields, *NAMES}


def test_a_field_of_one_endpoint_is_refused_by_the_other_unless_it_is_known_nowhere() -> None:
    chat, completions = set(ChatCompletionRequest.model_fields), set(CompletionRequest.model_fields)
    # A body for the wrong endpoint lacks its required field; tools do not exist in the older API.
    elsewhere = {"messages", "prompt", "tools", "tool_choice", "functions", "function_call"}
    templates = {"add_generation_prompt", "chat_template_kwargs"}
    assert (chat ^ completions) - elsewhere - templates <= set(NAMES)


async def test_hints_are_accepted_and_without_effect(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    hints: dict[str, Any] = {
        "store": False,
        "metadata": {"topic": "demo"},
        "user": "u",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
    }
    for more in ({}, hints):
        await router.openai.chat.completions.create(model=MODEL, messages=QUESTION, seed=1, **more)
    plain, hinted = worker.generates
    assert (plain.spec.prompt_token_ids, plain.spec.sampling) == (
        hinted.spec.prompt_token_ids,
        hinted.spec.sampling,
    )


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 0}, "tool_choice"),
        ({"functions": [{"name": "now"}]}, "functions"),
        ({"function_call": {"name": "now"}}, "function_call"),
    ],
)
def test_calling_tools_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        check_chat_supported(ChatCompletionRequest.model_validate({**CHAT, **fields}))
    assert (error.value.param, error.value.code) == (param, "unsupported_parameter")


async def test_with_tool_choice_none_tools_are_not_shown(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    plain: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
    for more in (
        {},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"functions": [{"name": "now"}], "function_call": "none"},
    ):
        assert (await router.post("chat/completions", {**plain, **more})).status_code == 200
    assert len({tuple(message.spec.prompt_token_ids) for message in worker.generates}) == 1
