"""Sequences that lose their worker: they move with their tokens, or wait for a worker, and end once."""

from __future__ import annotations

import pytest

from cluster.messages import Cancel, Generate, RequestError, RequestTimings
from cluster.sequence_spec import RequestKey
from router.dispatch.dispatcher import MAX_ATTEMPTS
from router.dispatch.request_queue import RECOVERY_WAIT_S
from router.policy.plan import NoWorkerError
from tests.router.dispatch_bench import TIMEOUT_MS, Bench, received, token_ids


@pytest.fixture
async def bench() -> Bench:
    return Bench()


def cancels(bench: Bench) -> list[tuple[str, int, str]]:
    """Worker, attempt and reason of each cancel."""
    return [(worker, cancel.key.attempt, cancel.reason) for worker, cancel in bench.sent(Cancel)]


# --- moving ------------------------------------------------------------------------------------------------


async def test_an_answer_that_has_begun_moves_with_its_tokens(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    ((first, generate),) = bench.sent(Generate)
    assert first == "d0"
    bench.tokens("d0", 5, timings=RequestTimings(prefill_ms=1.0))
    bench.tokens("d0", 6)
    bench.workers(d1=1)  # the first is gone
    ((_, _), (second, moved)) = bench.sent(Generate)
    assert second == "d1"
    assert moved.key.attempt == generate.key.attempt + 1
    assert moved.spec.output_token_ids == [5, 6]
    assert moved.spec.sampling == generate.spec.sampling
    assert moved.spec.deadline == generate.spec.deadline == bench.clock.unix() + TIMEOUT_MS / 1000
    bench.tokens("d1", 7, attempt=1, timings=RequestTimings(prefill_ms=2.0))
    bench.tokens("d1", 8, attempt=1, finish_reason="length")
    outputs = await received(generation)
    assert token_ids(outputs) == [5, 6, 7, 8]
    assert [output.timings for output in outputs[1:]] == [None] * 3
    assert outputs[-1].finish_reason == "length"
    assert len(bench.dispatcher.in_flight) == 0


async def test_a_broken_connection_is_enough_to_move(bench: Bench) -> None:
    """The worker may live: it is told to stop, in case the order reaches it, before another one begins."""
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    bench.tokens("d0", 5)
    bench.log.clear()
    bench.disconnect("d0")
    ((first, cancel), (second, moved)) = bench.log
    assert (first, cancel) == ("d0", Cancel(key=RequestKey("r", 0), reason="moved"))
    assert isinstance(moved, Generate)
    assert (second, moved.key.attempt, moved.spec.output_token_ids) == ("d1", 1, [5])
    bench.tokens("d1", 6, attempt=1, finish_reason="stop")
    assert token_ids(await received(generation)) == [5, 6]


async def test_a_worker_that_leaves_after_its_connection_broke_loses_nothing_more(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    bench.start()
    bench.disconnect("d0")
    bench.workers(d1=1)
    bench.timers.advance(1.0)
    assert bench.generates() == [("d0", 0, None), ("d1", 1, None)]
    assert cancels(bench) == [("d0", 0, "moved")]
    assert bench.metric("redispatches_total", reason="worker_lost", kind="retry") == 1


async def test_all_sequences_of_a_lost_worker_move_and_no_others(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    bench.start("a", "b", "c", "d")
    placed = {one.key.request_id: worker for worker, one in bench.sent(Generate)}
    assert sorted(placed.values()) == ["d0", "d0", "d1", "d1"]
    bench.log.clear()
    bench.disconnect("d0")
    moved = sorted(name for name, worker in placed.items() if worker == "d0")
    assert sorted(one.key.request_id for _, one in bench.sent(Cancel)) == moved
    assert sorted(one.key.request_id for _, one in bench.sent(Generate)) == moved
    assert {worker for worker, _ in bench.sent(Generate)} == {"d1"}


async def test_a_worker_with_a_full_queue_is_no_attempt(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    bench.connections["d0"].is_full = True
    bench.start()
    assert bench.generates() == [("d1", 0, None)]


async def test_an_error_that_another_worker_would_repeat_ends_the_request(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    bench.fails("d0", "invalid_request", retryable=False)
    (output,) = await received(generation)
    assert output.error is not None
    assert output.error.code == "invalid_request"
    assert bench.generates() == [("d0", 0, None)]
    assert len(bench.dispatcher.in_flight) == 0


async def test_attempts_are_bounded(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    for attempt in range(MAX_ATTEMPTS):
        bench.fails("d0", "engine_error", attempt=attempt)
        bench.timers.advance(1.0)
    assert bench.generates() == [("d0", attempt, None) for attempt in range(MAX_ATTEMPTS)]
    (output,) = await received(generation)
    assert output.error is not None
    assert output.error.code == "engine_error"


async def test_workers_that_drain_use_up_no_attempts(bench: Bench) -> None:
    """Each may have changed its role before the router heard of it."""
    names = [f"d{number}" for number in range(2 * MAX_ATTEMPTS)]
    bench.workers(**dict.fromkeys(names, 1))
    generation = bench.start()
    for attempt in range(2 * MAX_ATTEMPTS):
        (worker, _, _) = bench.generates()[-1]
        bench.fails(worker, "draining", attempt=attempt)
    assert sorted(worker for worker, _, _ in bench.generates()) == sorted(names)
    bench.timers.advance(1.0)
    bench.tokens(bench.generates()[-1][0], 5, attempt=2 * MAX_ATTEMPTS)
    assert token_ids(await received(generation)) == [5]


async def test_without_any_worker_a_new_request_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(NoWorkerError):
        bench.start()
    assert len(bench.dispatcher.in_flight) == 0
    assert len(bench.timers) == 0


# --- waiting for a worker ----------------------------------------------------------------------------------


async def test_it_waits_for_the_lost_worker_to_come_back(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.tokens("d0", 5)
    bench.workers()
    bench.timers.advance(3.0)
    assert len(bench.sent(Generate)) == 1
    bench.workers(d0=2)
    bench.timers.advance(1.0)
    assert [message.spec.output_token_ids for _, message in bench.sent(Generate)] == [[], [5]]
    bench.tokens("d0", 6, attempt=1, finish_reason="stop")
    assert token_ids(await received(generation)) == [5, 6]


async def test_it_waits_for_a_broken_connection_to_come_back(bench: Bench) -> None:
    """The same process may take it again, after it was told to stop the first attempt."""
    bench.workers(d0=1)
    generation = bench.start()
    bench.tokens("d0", 5)
    bench.disconnect("d0")
    bench.timers.advance(3.0)
    assert bench.generates() == [("d0", 0, None)]
    assert cancels(bench) == [("d0", 0, "moved")]
    bench.report("d0")
    bench.timers.advance(1.0)
    assert bench.generates() == [("d0", 0, None), ("d0", 1, None)]
    bench.tokens("d0", 99, attempt=0)  # before the cancel came there
    bench.tokens("d0", 6, attempt=1, finish_reason="stop")
    assert token_ids(await received(generation)) == [5, 6]
    assert cancels(bench) == [("d0", 0, "moved")], "once is enough"


async def test_the_wait_is_bounded_and_ends_with_the_first_error(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.disconnect("d0")
    bench.timers.advance(RECOVERY_WAIT_S - 0.5)
    assert 0 in generation.unfinished
    bench.timers.advance(1.0)
    (output,) = await received(generation)
    assert output.error == RequestError(
        code="worker_lost",
        message="The worker d0 that served this request was lost. Please retry.",
        retryable=True,
    )
    assert output.finish_reason == "error"
    assert len(bench.timers) == 1, "only the request's own deadline, until it is closed"
    bench.queue.close(generation, "done")
    assert len(bench.timers) == 0
    bench.report("d0")
    bench.timers.advance(60.0)
    assert bench.generates() == [("d0", 0, None)]


async def test_a_wait_that_begins_anew_is_bounded_anew(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.disconnect("d0")
    bench.timers.advance(RECOVERY_WAIT_S - 1)
    bench.report("d0")
    bench.timers.advance(0.5)
    bench.disconnect("d0")
    bench.timers.advance(RECOVERY_WAIT_S - 1)
    assert 0 in generation.unfinished
    bench.timers.advance(2.0)
    assert 0 not in generation.unfinished


async def test_a_waiting_request_can_be_cancelled(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.workers()
    bench.queue.close(generation, "client")
    bench.workers(d0=2)
    bench.timers.advance(60.0)
    assert len(bench.sent(Generate)) == 1
    assert len(bench.timers) == 0


async def test_the_deadline_covers_the_wait(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.timers.advance(TIMEOUT_MS / 1000 - 10)
    bench.disconnect("d0")
    bench.timers.advance(11.0)
    (output,) = await received(generation)
    assert output.error is not None
    assert output.error.code == "timeout"
    assert f"{TIMEOUT_MS} ms" in output.error.message
    bench.report("d0")
    bench.timers.advance(60.0)
    assert bench.generates() == [("d0", 0, None)]
    assert len(bench.timers) == 0


async def test_a_deadline_cancels_what_runs(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.tokens("d0", 5)
    bench.timers.advance(TIMEOUT_MS / 1000 + 1)
    outputs = await received(generation)
    assert token_ids(outputs) == [5]
    assert outputs[-1].error is not None
    assert outputs[-1].error.code == "timeout"
    assert cancels(bench) == [("d0", 0, "timeout")]
    assert len(bench.dispatcher.in_flight) == 0


async def test_at_shutdown_running_and_waiting_requests_end(bench: Bench) -> None:
    bench.workers(d0=1)
    waiting = bench.start("a")
    bench.disconnect("d0")
    bench.workers(d0=1, d1=1)
    running = bench.start("b")
    bench.queue.close_all("shutdown")
    for generation in (waiting, running):
        (output,) = await received(generation)
        assert output.error is not None
        assert output.error.code == "shutting_down"
    bench.timers.advance(60.0)
    assert [one.key.request_id for _, one in bench.sent(Generate)] == ["a", "b"]


# --- what a worker is told ---------------------------------------------------------------------------------


async def test_late_tokens_of_the_old_attempt_are_dropped(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    bench.fails("d0", "draining")
    bench.tokens("d0", 99, attempt=0)
    assert bench.metric("dropped_messages_total", reason="old_attempt") == 1
    bench.tokens("d1", 5, attempt=1, finish_reason="stop")
    assert token_ids(await received(generation)) == [5]


async def test_a_worker_that_goes_on_with_an_old_attempt_is_told_once(bench: Bench) -> None:
    bench.workers(d0=1, d1=1, d2=1)
    bench.start()
    bench.fails("d0", "draining")  # so it has stopped, or so it says
    assert cancels(bench) == []
    for _ in range(3):
        bench.tokens("d0", 99, attempt=0)
    assert cancels(bench) == [("d0", 0, "old_attempt")]
    bench.fails("d1", "draining", attempt=1)
    for _ in range(2):
        bench.tokens("d1", 99, attempt=1)
    assert cancels(bench) == [("d0", 0, "old_attempt"), ("d1", 1, "old_attempt")], "each attempt by itself"
    assert bench.metric("dropped_messages_total", reason="old_attempt") == 5


async def test_a_worker_that_goes_on_with_a_finished_request_is_told_once(bench: Bench) -> None:
    bench.workers(d0=1)
    bench.start()
    bench.tokens("d0", 5, finish_reason="stop")
    for _ in range(3):
        bench.tokens("d0", 6)
    assert cancels(bench) == [("d0", 0, "finished_request")]
    assert bench.metric("dropped_messages_total", reason="finished_request") == 3


async def test_a_worker_that_has_been_told_is_not_told_again(bench: Bench) -> None:
    """Outputs that were on their way when the client left."""
    bench.workers(d0=1)
    generation = bench.start()
    bench.queue.close(generation, "client")
    for _ in range(3):
        bench.tokens("d0", 5)
    assert cancels(bench) == [("d0", 0, "client")]
    assert bench.metric("dropped_messages_total", reason="finished_request") == 3


async def test_a_worker_that_was_not_asked_is_told_and_changes_nothing(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    for _ in range(2):
        bench.tokens("d1", 99)
    bench.tokens("d1", finish_reason="error", error=RequestError(code="engine_error", message="no"))
    assert cancels(bench) == [("d1", 0, "wrong_worker")]
    assert bench.metric("dropped_messages_total", reason="wrong_worker") == 3
    bench.tokens("d0", 5, finish_reason="stop")
    outputs = await received(generation)
    assert token_ids(outputs) == [5]
    assert outputs[-1].error is None


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort", "error"])
async def test_the_last_output_of_what_is_over_needs_no_cancel(bench: Bench, finish_reason: str) -> None:
    bench.workers(d0=1)
    bench.start()
    bench.tokens("d0", 5, finish_reason="stop")
    bench.tokens("d0", 6, finish_reason=finish_reason)
    assert cancels(bench) == []
    assert bench.metric("dropped_messages_total", reason="finished_request") == 1


async def test_a_worker_that_could_not_be_told_is_told_when_it_is_back(bench: Bench) -> None:
    """It was frozen until its lease ended, so that it could not be reached when its request moved."""
    bench.workers(d0=1, d1=1)
    bench.start()
    bench.workers(d1=1)
    assert cancels(bench) == []
    bench.workers(d0=1, d1=1)  # the same process
    for _ in range(3):
        bench.tokens("d0", 99, attempt=0)
    assert cancels(bench) == [("d0", 0, "old_attempt")]


async def test_a_full_queue_is_tried_again_with_the_next_late_output(bench: Bench) -> None:
    bench.workers(d0=1)
    bench.start()
    bench.tokens("d0", 5, finish_reason="stop")
    bench.connections["d0"].is_full = True
    bench.tokens("d0", 6)
    bench.connections["d0"].is_full = False
    for _ in range(2):
        bench.tokens("d0", 7)
    assert cancels(bench) == [("d0", 0, "finished_request")]


async def test_a_cancel_reaches_the_worker_that_has_it_now(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    bench.workers(d1=1)
    bench.queue.close(generation, "client")
    assert cancels(bench) == [("d1", 1, "client")]
