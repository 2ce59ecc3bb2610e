"""Requests that wait for places: in their order, for a bounded time, and without a trace when they leave."""

from __future__ import annotations

import pytest

from cluster.messages import Cancel, Generate
from router.dispatch.in_flight import Generation
from router.dispatch.waiting_line import LineFullError, NeverFitsError
from router.policy.plan import NoWorkerError
from tests.router.dispatch_bench import MAX_WAIT_MS, Bench, received


@pytest.fixture
async def bench() -> Bench:
    bench = Bench(max_sequences=2, max_waiting=3)
    bench.workers(d0=1)
    return bench


def on_workers(bench: Bench) -> list[str]:
    """The requests that were dispatched, in this order."""
    return [message.key.request_id for _, message in bench.sent(Generate)]


async def error_of(generation: Generation) -> tuple[str, str]:
    (output,) = await received(generation)
    assert output.error is not None
    return output.error.code, output.error.message


async def test_places_go_to_the_next_in_line(bench: Bench) -> None:
    first, _second, third = bench.start("a"), bench.start("b"), bench.start("c")
    assert on_workers(bench) == ["a", "b"]
    assert bench.metric("requests_waiting") == 1
    bench.tokens("d0", 5, finish_reason="stop", request_id="a")
    assert on_workers(bench) == ["a", "b"], "it has its place until its client has the answer"
    bench.queue.close(first, "done")
    assert on_workers(bench) == ["a", "b", "c"]
    assert bench.metric("requests_waiting") == 0
    bench.tokens("d0", 7, request_id="c")
    assert [output.token_ids for output in await received(third)] == [[7]]


async def test_the_smaller_priority_goes_first(bench: Bench) -> None:
    first, second = bench.start("a"), bench.start("b")
    for name, priority in (("late", 5), ("normal", 0), ("urgent", -1)):
        bench.start(name, priority=priority)
    for generation in (first, second):
        bench.queue.close(generation, "done")
    assert on_workers(bench) == ["a", "b", "urgent", "normal"]


async def test_a_request_of_several_sequences_gets_all_its_places_at_once(bench: Bench) -> None:
    first = bench.start("a")
    bench.start("b0", "b1")
    bench.start("c")
    assert on_workers(bench) == ["a"], "nobody passes the one that waits for two places"
    bench.queue.close(first, "done")
    assert on_workers(bench) == ["a", "b0", "b1"]


async def test_one_more_than_may_wait_is_refused(bench: Bench) -> None:
    for name in "abcde":
        bench.start(name)
    with pytest.raises(LineFullError):
        bench.start("f")
    with pytest.raises(NeverFitsError):
        bench.start("g0", "g1", "g2")
    assert bench.metric("admission_refused_total") == 1
    assert len(bench.timers) == 8, "five deadlines, and the patience of three"


async def test_whoever_waits_too_long_is_told(bench: Bench) -> None:
    bench.start("a")
    bench.start("b")
    third = bench.start("c")
    bench.timers.advance(MAX_WAIT_MS / 1000 - 1)
    fourth = bench.start("d")
    bench.timers.advance(1)
    code, message = await error_of(third)
    assert code == "queue_timeout"
    assert "No place was free within 5 s: this router serves at most 2 sequences" in message
    bench.queue.close(third, "error")
    assert bench.metric("requests_waiting") == 1
    assert fourth.unfinished
    assert bench.sent(Cancel) == [], "no worker has heard of it"


async def test_the_deadline_counts_from_the_arrival(bench: Bench) -> None:
    bench.start("a", "b")
    waiting = bench.start("c", timeout_ms=1000)
    bench.timers.advance(1)
    assert (await error_of(waiting))[0] == "timeout"


async def test_whoever_gives_up_is_not_dispatched(bench: Bench) -> None:
    both = bench.start("a", "b")
    bench.queue.close(bench.start("c"), "client")
    bench.queue.close(both, "done")
    assert on_workers(bench) == ["a", "b"]
    assert len(bench.timers) == 0
    assert bench.queue.line.num_admitted == bench.queue.line.num_waiting == 0


async def test_no_worker_is_there_when_its_turn_comes(bench: Bench) -> None:
    both = bench.start("a", "b")
    waiting, behind = bench.start("c"), bench.start("d")
    bench.report("d0", state="draining")
    bench.queue.close(both, "done")
    code, message = await error_of(waiting)
    assert (code, "d0 is draining" in message) == ("no_worker_available", True)
    bench.report("d0")
    bench.queue.close(waiting, "error")
    assert (await error_of(behind))[0] == "no_worker_available", "it had its turn at the same time"
    bench.queue.close(behind, "error")
    bench.start("e")
    assert on_workers(bench) == ["a", "b", "e"]


async def test_a_request_that_nobody_can_take_gives_its_places_back(bench: Bench) -> None:
    bench.report("d0", state="draining")
    for _ in range(3):
        with pytest.raises(NoWorkerError):
            bench.start("a", "b")
    assert bench.queue.line.num_admitted == 0
    assert len(bench.timers) == 0


async def test_a_shutdown_ends_those_that_wait_too(bench: Bench) -> None:
    generations = [bench.start(name) for name in "abc"]
    bench.queue.close_all("shutdown")
    for generation in generations:
        assert (await error_of(generation))[0] == "shutting_down"
        bench.queue.close(generation, "error")
    assert on_workers(bench) == ["a", "b"]
    assert len(bench.timers) == 0
    assert bench.queue.line.num_admitted == bench.queue.line.num_waiting == 0


async def test_arrivals_are_bounded_before_anything_is_read(bench: Bench) -> None:
    for _ in range(5):
        bench.queue.enter()
    with pytest.raises(LineFullError):
        bench.queue.enter()
    bench.queue.exit()
    bench.queue.enter()
