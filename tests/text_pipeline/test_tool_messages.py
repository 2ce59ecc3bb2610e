"""Which form of tool calls a template renders, for templates of every kind that models come with."""

from __future__ import annotations

from typing import Any

import pytest

from text_pipeline.chat_template import ChatTemplate
from text_pipeline.tool_messages import ToolCallStyle, fit_tool_calls, tool_support

_TURNS = "{% for m in messages %}<{{ m.role }}>"
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}


def template(turn: str) -> ChatTemplate:
    """One that renders each message as its role and ``turn``."""
    return ChatTemplate(f"{_TURNS}{turn}{{% endfor %}}", "", "")


def calls(arguments: str) -> str:
    return (
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
        + arguments
        + "</call>{% endfor %}"
    )


@pytest.mark.parametrize(
    ("turn", "style"),
    [
        (calls("{{ c.function.arguments | tojson }}"), ToolCallStyle()),
        ("{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}", ToolCallStyle()),
        (
            calls("{% for k, v in c.function.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}"),
            ToolCallStyle(),
        ),
        (calls("{{ c.function.arguments }}"), ToolCallStyle(arguments_as_text=True)),
        (calls("{{ 'json: ' + c.function.arguments }}"), ToolCallStyle(arguments_as_text=True)),
        (
            "{% if m.content is none %}"
            + calls("{{ c.function.arguments | tojson }}").replace("{{ m.content }}", "")
            + "{% else %}{{ m.content }}{% endif %}",
            ToolCallStyle(content_is_null=True),
        ),
        (
            "{% if m.content is none %}"
            + calls("{{ '' + c.function.arguments }}").replace("{{ m.content }}", "")
            + "{% else %}{{ m.content }}{% endif %}",
            ToolCallStyle(arguments_as_text=True, content_is_null=True),
        ),
    ],
    ids=["tojson", "whole", "items", "pasted", "added", "null", "null and added"],
)
def test_the_form_that_is_rendered_is_found(turn: str, style: ToolCallStyle) -> None:
    support = tool_support(template(turn))
    assert support.calls == style
    assert support.results
    if style.content_is_null:
        assert support.calls_with_text is None, "with text it would drop the calls"
    else:
        assert support.calls_with_text == style


def test_templates_that_drop_calls_or_results_are_known() -> None:
    plain = tool_support(template("{{ m.content }}"))
    assert (plain.calls, plain.calls_with_text, plain.results, plain.why) == (None, None, False, "")
    no_results = tool_support(
        template(
            calls("{{ c.function.arguments | tojson }}").replace(
                "{{ m.content }}", "{{ m.content if m.role != 'tool' }}"
            )
        )
    )
    assert no_results.calls == ToolCallStyle()
    assert not no_results.results


def test_a_template_s_own_refusal_is_told() -> None:
    support = tool_support(
        template("{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{{ m.content }}")
    )
    assert support.calls is None
    assert support.why == ": no tools here"


def test_calls_are_brought_into_form() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert fit_tool_calls(message, ToolCallStyle()) == message
    fitted = fit_tool_calls(message, ToolCallStyle(arguments_as_text=True, content_is_null=True))
    assert fitted["content"] is None
    assert fitted["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich", "days": 2}'
    assert CALL["function"]["arguments"] == {"city": "Zürich", "days": 2}, "the message itself is unchanged"
    with_text = {**message, "content": "Let me see."}
    assert fit_tool_calls(with_text, ToolCallStyle(content_is_null=True))["content"] == "Let me see."
