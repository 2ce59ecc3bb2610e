"""``usage`` has OpenAI's members and no others; where the time went is told on request, beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cluster.messages import RequestTimings
from router.api.response.usage import UsageCounter
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import EOS, ScriptedWorker, answer
from text_pipeline.tokenizer import Tokenizer

MakeWorker = Callable[..., ScriptedWorker]
EXPLAIN = {"X-Leadout-Explain": "1"}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """All that may be in it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_nothing_yet_is_all_zeros() -> None:
    counter = UsageCounter([7, 5], 2)
    assert counter.body() == usage(12, 0, 0)
    assert counter.explanation() == {"timings": None}


def test_each_prompt_counts_once_and_its_smallest_hit() -> None:
    counter = UsageCounter([7, 5], 2)
    counter.first_token(1, RequestTimings(num_prefill_cached_tokens=4, queue_ms=1.5))
    counter.first_token(0, RequestTimings(num_computed_tokens=7, num_decode_cached_tokens=2))
    counter.first_token(2, RequestTimings(num_prefill_cached_tokens=1, num_decode_cached_tokens=2))
    for choice, tokens in enumerate((3, 1, 4, 1)):
        counter.add(choice, tokens)
    assert counter.body() == usage(12, 9, 2 + 3)
    timings = counter.explanation()["timings"]
    assert set(timings) == set(RequestTimings.__struct_fields__)  # zeros as well
    assert (timings["queue_ms"], timings["num_computed_tokens"], timings["prefill_worker"]) == (1.5, 0, "")
    assert msgspec.convert(timings, RequestTimings) == RequestTimings(
        num_prefill_cached_tokens=4, queue_ms=1.5
    )


async def chunks(router: RunningRouter, path: str, headers: dict[str, str], **fields: Any) -> list[Any]:
    response = await router.post(
        path, {"model": MODEL, "stream": True, **BODIES[path], **fields}, headers=headers
    )
    assert response.status_code == 200
    *events, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
async def router(start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer) -> RunningRouter:
    script = answer([*tokenizer.encode("one two three"), EOS], cached_tokens=1)
    running: RunningRouter = await start_router(make_worker(script=script))
    return running


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer(router: RunningRouter, path: str) -> None:
    body = {"model": MODEL, **BODIES[path]}
    plain = (await router.post(path, body)).json()
    prompt_tokens = len(router.workers[0].generates[0].spec.prompt_token_ids)
    assert plain["usage"] == usage(prompt_tokens, 4, 1)
    assert "leadout" not in plain
    response = await router.post(path, body, headers=EXPLAIN)
    explained = response.json()
    assert explained.keys() == {*plain, "leadout"}
    assert explained["usage"] == plain["usage"]
    timings = explained["leadout"]["timings"]
    assert timings["decode_worker"] == "d0"
    places = ("num_computed_tokens", "num_prefill_cached_tokens", "num_decode_cached_tokens")
    assert sum(timings[place] for place in places) == prompt_tokens
    assert json.loads(response.headers["x-leadout-plan"])["decode_worker"] == "d0"


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_ends_with_what_was_asked_for(router: RunningRouter, path: str) -> None:
    with_usage = {"stream_options": {"include_usage": True}}
    neither = await chunks(router, path, {})
    assert not any({"usage", "leadout"} & chunk.keys() for chunk in neither)
    assert all(chunk["choices"] for chunk in neither)

    *pieces, last = await chunks(router, path, {}, **with_usage)
    assert all(chunk["usage"] is None for chunk in pieces)
    assert len(pieces) == len(neither)
    assert last["choices"] == []
    assert last["usage"] == usage(len(router.workers[0].generates[0].spec.prompt_token_ids), 4, 1)
    assert "leadout" not in last

    *pieces, explained = await chunks(router, path, EXPLAIN)
    assert len(pieces) == len(neither)
    assert (explained["choices"], "usage" in explained) == ([], False)
    assert explained["leadout"]["timings"]["decode_worker"] == "d0"

    *pieces, both = await chunks(router, path, EXPLAIN, **with_usage)
    assert both["usage"] == last["usage"]
    assert both["leadout"] == explained["leadout"]
    assert not any("leadout" in chunk for chunk in pieces)


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_usage_in_every_chunk(router: RunningRouter, path: str, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    got = await chunks(router, path, {}, n=2, stream_options=options)
    prompt_tokens = len(router.workers[0].generates[0].spec.prompt_token_ids)
    counted = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counted == sorted(counted)
    assert counted[-1] == 8  # of all choices
    assert all(
        chunk["usage"] == usage(prompt_tokens, count, 1) for chunk, count in zip(got, counted, strict=True)
    )
    assert counted[0] == 1
    assert (got[-1]["choices"] == []) is include_usage


@pytest.mark.parametrize("header", ["0", "no", ""])
async def test_other_values_of_the_header_ask_for_nothing(router: RunningRouter, header: str) -> None:
    body = {"model": MODEL, **BODIES["completions"]}
    response = await router.post("completions", body, headers={"X-Leadout-Explain": header})
    assert "leadout" not in response.json()
    assert "x-leadout-plan" not in response.headers
