"""One request to a real HTTP server, and the record of it."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from leadout.bench.client import RequestRecord, Target, send
from leadout.bench.workload import BenchRequest
from tests.leadout.http_server import Answer, as_json, event_stream, scripted_server

_REQUEST = BenchRequest(prompt="once upon", max_tokens=5)


async def _record(answer: Answer) -> RequestRecord:
    with scripted_server(lambda _request: answer) as server:
        return await _send(Target(url=server.url, model="m"))


async def _send(target: Target) -> RequestRecord:
    """With a clock that is one second later each time it is read."""
    clock = itertools.count()
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        return await send(client, target, _REQUEST, clock=lambda: float(next(clock)))


def _text(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


async def test_a_good_stream() -> None:
    record = await _record(
        event_stream(
            _text("a"),
            _text(""),  # no text: not a token's arrival
            _text("b"),
            _text("c"),
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 4,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
                "leadout": {"timings": {"queue_ms": 1.5}},
            },
        )
    )
    assert record == RequestRecord(
        sent_at=0.0,
        token_times=[1.0, 2.0, 3.0],
        ended_at=3.0,
        prompt_tokens=7,
        completion_tokens=4,
        cached_tokens=2,
        server_timings={"queue_ms": 1.5},
    )


async def test_what_is_asked_of_the_server() -> None:
    with scripted_server(lambda _request: event_stream(_text("a"))) as server:
        await _send(Target(url=server.url, model="m"))
        headers = {"Authorization": "Bearer k"}
        await _send(Target(url=server.url, model="m", ignore_eos=True, temperature=0.5, headers=headers))
    plain, special = server.requests
    assert (plain.method, plain.path) == ("POST", "/v1/completions")
    assert plain.body == {
        "model": "m",
        "prompt": "once upon",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "authorization" not in plain.headers
    assert plain.headers["x-leadout-explain"] == special.headers["x-leadout-explain"] == "1"
    assert special.body == {**plain.body, "temperature": 0.5, "ignore_eos": True}
    assert special.headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": None, "completion_tokens": None}, {"prompt_tokens_details": None}],
)
async def test_pieces_count_as_tokens_if_the_server_does_not_say(usage: dict[str, Any] | None) -> None:
    record = await _record(event_stream(_text("a"), _text("b"), {"choices": [], "usage": usage}))
    assert record.error == ""
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (0, 2, 0)


async def test_an_error_status() -> None:
    record = await _record(as_json({"error": {"message": "too many requests"}}, status=429))
    assert record.error == "HTTP 429"
    assert record.token_times == []
    assert (record.sent_at, record.ended_at) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"code": "worker_lost", "message": "…"}, "worker_lost"),
        ({"code": 500}, "500"),
        ({"message": "no code"}, "error in stream"),
        ("just text", "error in stream"),
    ],
)
async def test_an_error_in_the_stream(error: Any, expected: str) -> None:
    record = await _record(event_stream(_text("a"), {"error": error}, done=True))
    assert record.error == expected
    assert record.token_times == [1.0]


async def test_an_error_of_null_is_none() -> None:
    record = await _record(event_stream({**_text("a"), "error": None}))
    assert record.error == ""
    assert record.completion_tokens == 1


async def test_a_stream_that_ends_without_its_end_mark_was_cut_off() -> None:
    record = await _record(event_stream(_text("a"), done=False))
    assert record.error == "stream cut off"


async def test_a_connection_that_breaks_within_the_stream() -> None:
    record = await _record(event_stream(_text("a"), done=False, breaks_off=True))
    assert record.error == "RemoteProtocolError"
    assert record.token_times == [1.0]


async def test_an_empty_answer_is_a_failure() -> None:
    record = await _record(event_stream(_text(""), {"choices": []}))
    assert record.error == "empty answer"


@pytest.mark.parametrize(("data", "expected"), [("{no json", "JSONDecodeError"), ("5", "ValueError")])
async def test_nonsense_in_the_stream(data: str, expected: str) -> None:
    record = await _record(event_stream(data))
    assert record.error == expected


async def test_lines_that_are_no_data_are_passed_over() -> None:
    answer = event_stream(_text("a"))
    record = await _record(Answer(200, [": ping\n\n", "event: x\n", *answer.pieces], is_stream=True))
    assert record.error == ""
    assert len(record.token_times) == 1


async def test_a_server_that_is_not_there() -> None:
    with scripted_server(lambda _request: as_json({})) as server:
        pass
    record = await _send(Target(url=server.url, model="m"))
    assert record.error == "ConnectError"
