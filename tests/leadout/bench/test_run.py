"""A whole run against a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from leadout.bench.client import RequestRecord, Target
from leadout.bench.run import find_model, find_number_formats, measure, run_bench
from leadout.bench.statistics import Goodput
from leadout.bench.workload import BenchRequest
from leadout.errors import UserError
from tests.leadout.http_server import Answer, Request, as_json, event_stream, scripted_server


def _requests(*prompts: str) -> list[BenchRequest]:
    return [BenchRequest(prompt=prompt, max_tokens=2) for prompt in prompts]


def _two_tokens(_request: Request) -> Answer:
    texts = [{"choices": [{"index": 0, "text": text}]} for text in "ab"]
    return event_stream(*texts, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


async def _measure(
    url: str, workload: Sequence[BenchRequest], *, concurrency: int | None = None, num_warmup: int = 0
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """The records, and what was reported as done meanwhile."""
    done: list[RequestRecord] = []
    records, _duration_s = await measure(
        Target(url=url, model="m"),
        workload,
        concurrency=concurrency,
        num_warmup=num_warmup,
        on_done=done.append,
    )
    return records, done


async def test_every_request_is_sent_once_and_recorded_in_order() -> None:
    def respond(request: Request) -> Answer:
        texts = [{"choices": [{"text": "x"}]}] * int(request.body["prompt"])
        return event_stream(*texts)

    with scripted_server(respond) as server:
        records, done = await _measure(server.url, _requests("3", "1", "2"))
    assert [len(record.token_times) for record in records] == [3, 1, 2]
    assert sorted(body["prompt"] for body in server.bodies()) == ["1", "2", "3"]
    assert sorted(map(id, done)) == sorted(map(id, records))


async def test_the_first_failure_does_not_end_the_run() -> None:
    def respond(request: Request) -> Answer:
        return as_json({}, status=503) if request.body["prompt"] == "bad" else _two_tokens(request)

    with scripted_server(respond) as server:
        records, _done = await _measure(server.url, _requests("bad", "fine", "bad", "fine"), concurrency=1)
    assert [record.error for record in records] == ["HTTP 503", "", "HTTP 503", ""]


class _Gauge:
    """Counts the requests that are in the server; each waits until ``full`` of them are, or the last came."""

    def __init__(self, full: int, total: int) -> None:
        self.most = 0
        self._now = 0
        self._seen = 0
        self._full, self._total = full, total
        self._changed = threading.Condition()

    def respond(self, request: Request) -> Answer:
        with self._changed:
            self._now += 1
            self._seen += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            is_let_go = self._changed.wait_for(
                lambda: self._now >= self._full or self.most >= self._full or self._seen == self._total,
                timeout=20,
            )
            self._now -= 1
        return _two_tokens(request) if is_let_go else as_json({}, status=500)


async def test_no_more_requests_than_the_concurrency_are_under_way() -> None:
    gauge = _Gauge(full=3, total=12)
    with scripted_server(gauge.respond) as server:
        records, _done = await _measure(server.url, _requests(*"abcdefghijkl"), concurrency=3)
    assert gauge.most == 3
    assert {record.error for record in records} == {""}


async def test_without_a_concurrency_all_requests_are_under_way_at_once() -> None:
    gauge = _Gauge(full=12, total=12)
    with scripted_server(gauge.respond) as server:
        records, _done = await _measure(server.url, _requests(*"abcdefghijkl"))
    assert gauge.most == 12
    assert {record.error for record in records} == {""}


async def test_requests_wait_for_their_time() -> None:
    arrivals = {"first": 0.0, "third": 0.2, "second": 0.1}
    workload = [BenchRequest(prompt=name, max_tokens=2, at_s=at_s) for name, at_s in arrivals.items()]
    with scripted_server(_two_tokens) as server:
        records, _done = await _measure(server.url, workload)
    first, third, second = records
    assert first.sent_at < second.sent_at < third.sent_at


async def test_warm_up_requests_come_first_differ_and_are_not_recorded() -> None:
    with scripted_server(_two_tokens) as server:
        records, done = await _measure(server.url, _requests("a", "b", "c"), concurrency=1, num_warmup=2)
    assert [body["prompt"] for body in server.bodies()] == ["warm up a", "warm up b", "a", "b", "c"]
    assert len(records) == len(done) == 3


async def test_a_failed_warm_up_ends_the_run() -> None:
    with (
        scripted_server(lambda _request: as_json({}, status=404)) as server,
        pytest.raises(UserError, match="warm-up request failed: HTTP 404"),
    ):
        await _measure(server.url, _requests("a", "b"), num_warmup=1)
    assert len(server.requests) == 1


async def test_the_first_listed_model_is_found() -> None:
    with scripted_server(lambda _request: as_json({"data": [{"id": "one"}, {"id": "two"}]})) as server:
        assert await find_model(server.url) == "one"
    assert server.requests[0].path == "/v1/models"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (as_json({"data": []}), "lists no model"),
        (as_json({}), "no OpenAI-compatible server"),
        (as_json([]), "no OpenAI-compatible server"),
        (as_json({}, status=500), "no OpenAI-compatible server"),
        (Answer(200, ["<html>"]), "no OpenAI-compatible server"),
    ],
)
async def test_a_server_without_models_is_refused(answer: Answer, message: str) -> None:
    with scripted_server(lambda _request: answer) as server:
        with pytest.raises(UserError, match=message) as caught:
            await find_model(server.url)
        assert server.url in str(caught.value)


_WORKERS = [{"dtype": "float16", "kernels": "some"}, {"dtype": "float16", "kernels": "some"}]


@pytest.mark.parametrize(
    ("answer", "formats"),
    [
        (as_json({"workers": _WORKERS}), ("float16: some",)),
        (as_json({"workers": [{"id": "of an older version"}]}), ()),
        (as_json([]), ()),
        (as_json({}, status=404), ()),
        (Answer(200, ["<html>"]), ()),
    ],
)
async def test_what_a_leadout_server_computes_in(answer: Answer, formats: tuple[str, ...]) -> None:
    with scripted_server(lambda _request: answer) as server:
        assert await find_number_formats(Target(url=server.url, model="m")) == formats


def _run_bench(url: str, *, as_json: bool = False, goodput: Goodput | None = None, **options: Any) -> Any:
    arguments = {"concurrency": 2, "num_warmup": 0, **options}
    return run_bench(
        Target(url=url, model="m"), _requests("a", "b", "c"), goodput=goodput, as_json=as_json, **arguments
    )


def test_the_figures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def respond(request: Request) -> Answer:
        return as_json({}, status=503) if request.body["prompt"] == "b" else _two_tokens(request)

    with scripted_server(respond) as server:
        result = _run_bench(
            server.url, goodput=Goodput(e2e_ms=60_000), number_formats=("float16: some [kernels]",)
        )
    assert (result.num_requests, result.num_failed) == (3, 1)
    output = capsys.readouterr().out
    for part in ("TTFT", "ITL", "TPOT", "E2E", "p95", "3 requests, 1 failed", "goodput: ", "1 × HTTP 503"):
        assert part in output
    assert "the server computes in float16: some [kernels]" in output


def test_json_is_all_that_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(_two_tokens) as server:
        result = _run_bench(server.url, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result.to_json()))
    assert result.ttft_ms.count == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0, must be at least 1"),
        ({"num_warmup": -1}, "warm-up requests is -1, must be at least 0"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_sent(
    options: dict[str, int], message: str
) -> None:
    with scripted_server(_two_tokens) as server:
        with pytest.raises(UserError, match=message):
            _run_bench(server.url, **options)
        assert server.requests == []
