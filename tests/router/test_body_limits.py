"""Too many of something: the field, the number and the limit, before the schema looks at each."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.settings import RouterConfig
from router.api.errors import ApiError
from router.api.request.body_limits import body_limits, check_counts, check_request_tokens, max_request_tokens

LIMITS = body_limits(RouterConfig(max_messages=3, max_content_parts=4, max_prompts=2))
MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"messages": [MESSAGE] * 4},
            "messages",
            "At most 3 entries of 'messages' are allowed (router.max_messages), got 4.",
        ),
        (
            {"messages": [{"content": [PART] * 3}, {"tool_calls": [{}] * 2}]},
            "messages",
            "At most 4 content parts are allowed (router.max_content_parts), got 5.",
        ),
        ({"prompt": ["a"] * 3}, "prompt", "At most 2 prompts are allowed (router.max_prompts), got 3."),
        ({"prompt": [[1]] * 3}, "prompt", "At most 2 prompts are allowed (router.max_prompts), got 3."),
        ({"prompt": [1] * 100}, "prompt", "100 tokens in the prompt"),
        ({"prompt": [1.5] * 100}, "prompt", "100 tokens in the prompt"),
        ({"prompt": [[1], [1] * 100]}, "prompt[1]", "100 tokens in the prompt[1]"),
        ({"stop": ["a"] * 17}, "stop", "At most 16 stop strings are allowed, got 17."),
        ({"stop": "a" * 1025}, "stop", "A stop string may have 1024 bytes, and this has 1025."),
        ({"stop": ["a", "é" * 513]}, "stop[1]", "A stop string may have 1024 bytes, and this has 1026."),
        (
            {"stop_token_ids": [1] * 129},
            "stop_token_ids",
            "At most 128 entries of 'stop_token_ids' are allowed, got 129.",
        ),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "got 1025"),
        ({"tools": [{}] * 129}, "tools", "got 129"),
        ({"functions": [{}] * 129}, "functions", "got 129"),
    ],
)
def test_what_is_too_much_is_named(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_counts(body, LIMITS, max_model_len=100)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [MESSAGE] * 3},
        {"messages": [{"content": [PART] * 4}]},
        {"prompt": ["a" * 10**6] * 2},
        {"prompt": [1] * 99},
        {"prompt": [[1] * 99] * 2},
        {"prompt": []},
        {"stop": ["a" * 1024] * 16},
        {"stop": "é" * 512},
        {"stop": None},
        {"stop_token_ids": [1] * 128, "logit_bias": dict.fromkeys(map(str, range(1024)), 1)},
        {"messages": "x", "prompt": 3, "stop": [1, {}], "logit_bias": "x", "tools": None},  # the schema's
        {"messages": [1, "x", None, []][:3]},
        {"unknown": [1] * 10**5},
    ],
)
def test_what_is_not_too_much_passes(body: dict[str, Any]) -> None:
    check_counts(body, LIMITS, max_model_len=100)


def test_without_a_model_token_ids_are_not_counted() -> None:
    check_counts({"prompt": [1] * 1000}, LIMITS, max_model_len=None)


def test_all_prompts_of_a_request_together() -> None:
    assert max_request_tokens(8_192) == 262_144
    assert max_request_tokens(10**6) == 10**6
    check_request_tokens(262_144, 8_192, "prompt")
    with pytest.raises(ApiError, match="262144 tokens together, and these have at least 262145"):
        check_request_tokens(262_145, 8_192, "prompt")
    with pytest.raises(ApiError, match="together"):
        check_counts({"prompt": [[1] * 8_000] * 33}, body_limits(RouterConfig()), max_model_len=8_192)
