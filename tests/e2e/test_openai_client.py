"""What an application sees through the official client, with a real model behind it."""

from __future__ import annotations

import openai
import pytest

from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(one_prefill_one_decode: RunningCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{one_prefill_one_decode.url}/v1", api_key="none", max_retries=0)


def test_a_sensible_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37
    assert answer.usage.total_tokens == 37 + answer.usage.completion_tokens


def test_a_stream_says_the_same_and_the_cache_is_used(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=40)
    stream = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 32


def test_seeded_sampling_repeats_itself(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about a strange animal."}],
            temperature=1.2,
            seed=seed,
            max_tokens=24,
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_several_choices_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        n=3,
        temperature=1.0,
        seed=5,
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        joined = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
        assert joined.decode("utf-8", "replace").startswith(choice.message.content or "")
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6,", temperature=0, max_tokens=40, stop=[" 9"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.endswith("8,")


def test_bad_requests_are_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=CAPITAL)
    with pytest.raises(openai.BadRequestError, match=r"8192|5808") as overflow:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=4)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": 5}])  # type: ignore[list-item]


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
