"""The history of a conversation: what is rendered, and what is refused with the path of the fault."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.errors import ApiError
from router.api.request.chat_messages import chat_messages, fit_to_template
from router.api.request.schemas import ChatCompletionRequest
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import EOS, answer
from tests.router.test_chat_api import MakeWorker
from text_pipeline.chat_template import ChatTemplate
from text_pipeline.tokenizer import Tokenizer

QUESTION = {"role": "user", "content": "Weather?"}


def call(arguments: Any = '{"city": "Bern"}', **fields: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
        **fields,
    }


CALLING = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
TOOLS_TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}{% endfor %}",
    "",
    "",
)
NULL_TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}[{{ m.tool_calls | tojson }}]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "",
    "",
)
CALLS_ONLY_TEMPLATE = ChatTemplate(
    "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}",
    "",
    "",
)
PLAIN_TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "", "")


def rendered(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": list(messages)})
    return chat_messages(body.messages)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
        ({"role": "assistant", "content": "No:", "refusal": "I will not."}, "No:\nI will not."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": "", "tool_calls": [], "function_call": None, "audio": None}, ""),
    ],
)
def test_an_assistant_s_message_may_have_no_content(message: dict[str, Any], content: str) -> None:
    assert rendered(QUESTION, message)[1] == {"role": "assistant", "content": content}


def test_tool_calls_and_results_as_templates_want_them() -> None:
    messages = rendered(QUESTION, CALLING, RESULT)
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
    ]
    text = TOOLS_TEMPLATE.render(fit_to_template(messages, TOOLS_TEMPLATE))
    assert '<assistant>[{"name": "weather", "arguments": {"city": "Bern"}}]<tool>rain' in text


def test_the_deprecated_form_is_the_same() -> None:
    messages = rendered(
        QUESTION,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "rain"},
    )
    (made,) = messages[1]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": {}}
    assert messages[2] == {
        "role": "tool",
        "content": "rain",
        "tool_call_id": made["id"],
        "name": "weather",
    }


def test_what_a_thinking_model_thought_is_for_its_template() -> None:
    assert rendered({"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}) == [
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    ]


@pytest.mark.parametrize("arguments", ["", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    messages = rendered({**CALLING, "tool_calls": [call(arguments)]})
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system"}], "messages[0].content"),
        ([CALLING, {**RESULT, "content": None}], "messages[1].content"),
        ([RESULT], "messages[0].tool_call_id"),
        ([RESULT, CALLING], "messages[0].tool_call_id"),
        ([CALLING, {"role": "tool", "content": "rain"}], "messages[1].tool_call_id"),
        ([CALLING, {**RESULT, "tool_call_id": "c2"}], "messages[1].tool_call_id"),
        ([{"role": "function", "content": "rain"}], "messages[0].name"),
        ([{"role": "function", "name": "weather", "content": "rain"}], "messages[0].name"),
        ([{**QUESTION, "tool_calls": [call()]}], "messages[0].tool_calls"),
        ([{**QUESTION, "refusal": "no"}], "messages[0].refusal"),
        ([{**QUESTION, "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([{**CALLING, "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([{**CALLING, "audio": {"id": "a"}}], "messages[0].audio"),
        ([{**CALLING, "tool_calls": [call(id=None)]}], "messages[0].tool_calls[0].id"),
        ([{**CALLING, "tool_calls": [call(), call()]}], "messages[0].tool_calls[1].id"),
        ([{**CALLING, "tool_calls": [call(type="custom")]}], "messages[0].tool_calls[0].type"),
        ([{**CALLING, "tool_calls": [call(function=None)]}], "messages[0].tool_calls[0].function"),
        ([{**CALLING, "tool_calls": [call("{")]}], "messages[0].tool_calls[0].function.arguments"),
        ([{**CALLING, "tool_calls": [call("[1]")]}], "messages[0].tool_calls[0].function.arguments"),
        ([{**CALLING, "tool_calls": [call("[" * 9999)]}], "messages[0].tool_calls[0].function.arguments"),
        ([{**CALLING, "function_call": {"name": "f", "arguments": "{}"}}], "messages[0].function_call"),
        ([{"role": "x" * 9999, "content": "q"}], "messages[0].role"),
    ],
)
def test_faults_are_named(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as error:
        rendered(*messages)
    assert (error.value.status, error.value.param) == (400, param)
    assert len(error.value.message) < 300


@pytest.mark.parametrize(
    ("template", "messages", "param", "message"),
    [
        (PLAIN_TEMPLATE, [QUESTION, CALLING], "messages[1].tool_calls", "does not render tool calls."),
        (CALLS_ONLY_TEMPLATE, [CALLING, RESULT], "messages[1]", "does not render tool results."),
        (
            NULL_TEMPLATE,
            [{**CALLING, "content": "Let me see."}],
            "messages[0].tool_calls",
            "does not render tool calls beside text.",
        ),
    ],
)
def test_a_template_that_would_drop_them_is_an_error(
    template: ChatTemplate, messages: list[dict[str, Any]], param: str, message: str
) -> None:
    with pytest.raises(ApiError) as error:
        fit_to_template(rendered(*messages), template)
    assert (error.value.param, error.value.code) == (param, "unsupported_parameter")
    assert message in error.value.message


def test_a_template_that_wants_null_gets_it() -> None:
    text = NULL_TEMPLATE.render(fit_to_template(rendered(QUESTION, CALLING, RESULT), NULL_TEMPLATE))
    assert '"arguments": {"city": "Bern"}' in text


async def test_through_the_api(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    """The bundled model's template knows no tools."""
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    history: list[Any] = [QUESTION, {"role": "assistant", "content": None, "refusal": "No."}, QUESTION]
    await router.openai.chat.completions.create(model=MODEL, messages=history)
    prompt = tokenizer.decode(worker.generates[0].spec.prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\nNo.<|im_end|>" in prompt
    response = await router.post(
        "chat/completions", {"model": MODEL, "messages": [QUESTION, CALLING, RESULT]}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls"
    router.assert_idle()
