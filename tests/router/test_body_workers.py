"""Work on bodies in other processes: what comes back, what dies, what waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from router.api.errors import ApiError
from router.body_workers import LARGE_BODY_BYTES, BodyNotPreparedError, BodyWorkers, TooManyBodiesError
from router.metrics import RouterMetrics
from tests.router import body_functions
from tests.router.scripted_worker import until, within

LARGE = bytes(LARGE_BODY_BYTES + 1)
StartWorkers = Callable[..., BodyWorkers]
pytestmark = pytest.mark.processes


@pytest.fixture
async def start_workers() -> AsyncIterator[StartWorkers]:
    """``start_workers(num_processes=1, …)``; ended after the test."""
    started: list[BodyWorkers] = []

    def start(num_processes: int = 1, max_waiting_bytes: int = 2**24, **options: float) -> BodyWorkers:
        workers = BodyWorkers(
            body_functions.load_nothing,
            RouterMetrics(),
            num_processes=num_processes,
            max_waiting_bytes=max_waiting_bytes,
            **options,
        )
        started.append(workers)
        return workers

    yield start
    for workers in started:
        pids = workers.pids
        await within(workers.close(), "the end of the processes")
        assert not workers.pids
        assert not any(psutil.pid_exists(pid) for pid in pids)


def waiting(workers: BodyWorkers) -> float:
    return workers._metrics.bodies_waiting._value.get()


def in_work(workers: BodyWorkers) -> float:
    return workers._metrics.bodies_in_work._value.get()


async def test_work_is_done_elsewhere_by_one_process_after_another_body(start_workers: StartWorkers) -> None:
    workers = start_workers(num_processes=2)
    await workers.start()
    (started,) = workers.pids
    pid, context, data = await workers.run(body_functions.where, {"a": 1}, LARGE)
    assert (pid, context, data) == (started, {"a": 1}, LARGE)
    assert pid != os.getpid()
    again, _, _ = await workers.run(body_functions.where, None, b"x")
    assert again == pid
    assert workers.pids == (pid,)  # a second one is started when both are needed


async def test_the_event_loop_runs_meanwhile(start_workers: StartWorkers, tmp_path: Path) -> None:
    workers = start_workers()
    go = tmp_path / "go"
    running = asyncio.create_task(workers.run(body_functions.wait_for_file, go, b""))
    await until(go.with_suffix(".begun").exists, "the work")
    go.touch()  # from here: had the work stopped this loop, it would never end
    assert await within(running, "the result") == workers.pids[0]


async def test_what_is_printed_there_harms_nothing(start_workers: StartWorkers) -> None:
    workers = start_workers()
    assert await workers.run(body_functions.chatter, None, b"") == "quiet"
    assert await workers.run(body_functions.chatter, None, b"") == "quiet"


async def test_an_expected_error_comes_back_whole(start_workers: StartWorkers) -> None:
    workers = start_workers()
    with pytest.raises(ApiError) as caught:
        await workers.run(body_functions.refuse, None, b"", expected=ApiError)
    error = caught.value
    assert (error.status, error.message, error.error_type) == (418, "no tea", "t")
    assert (error.param, error.code, error.retry_after) == ("p", "c", 7)
    assert str(error) == "no tea"


async def test_a_bug_fails_one_call_only(start_workers: StartWorkers) -> None:
    workers = start_workers()
    with pytest.raises(RuntimeError, match="KeyError: 'a bug'"):
        await workers.run(body_functions.break_down, None, b"")
    pids = workers.pids
    assert (await workers.run(body_functions.where, None, b""))[0] == pids[0]


async def test_a_process_that_dies_is_replaced_and_its_body_tried_once_more(
    start_workers: StartWorkers, tmp_path: Path
) -> None:
    workers = start_workers()
    await workers.start()
    (first,) = workers.pids
    assert await workers.run(body_functions.die_until_file, tmp_path / "died", b"") != first
    with pytest.raises(BodyNotPreparedError):
        await workers.run(body_functions.die, None, b"")
    pid, _, _ = await workers.run(body_functions.where, None, b"")
    assert workers.pids == (pid,)


async def test_work_without_an_end_is_given_up(start_workers: StartWorkers, tmp_path: Path) -> None:
    workers = start_workers(max_work_s=0.2)
    await workers.start()
    (stuck,) = workers.pids
    with pytest.raises(BodyNotPreparedError):
        await workers.run(body_functions.wait_for_file, tmp_path / "never", b"")
    assert not psutil.pid_exists(stuck)


async def test_who_leaves_while_waiting_is_dropped(start_workers: StartWorkers, tmp_path: Path) -> None:
    workers = start_workers()
    go, trace = tmp_path / "go", tmp_path / "trace"
    running = asyncio.create_task(workers.run(body_functions.wait_for_file, go, b""))
    await until(go.with_suffix(".begun").exists, "the work")
    left = asyncio.create_task(workers.run(body_functions.touch, trace, b"x"))
    await until(lambda: waiting(workers) == 1, "the waiting one")
    left.cancel()
    await until(lambda: waiting(workers) == 0, "its leaving")
    go.touch()
    await within(running, "the result")
    await workers.run(body_functions.where, None, b"")  # what waited before it would have run before it
    assert not trace.exists()


async def test_work_whose_caller_left_ends_and_gives_its_place_back(
    start_workers: StartWorkers, tmp_path: Path
) -> None:
    workers = start_workers()
    go = tmp_path / "go"
    left = asyncio.create_task(workers.run(body_functions.wait_for_file, go, b""))
    await until(go.with_suffix(".begun").exists, "the work")
    pids = workers.pids
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert in_work(workers) == 1
    go.touch()
    assert (await within(workers.run(body_functions.where, None, b""), "a place"))[0] == pids[0]
    assert (in_work(workers), waiting(workers)) == (0, 0)


async def test_large_bodies_leave_a_process_to_the_others(
    start_workers: StartWorkers, tmp_path: Path
) -> None:
    workers = start_workers(num_processes=2)
    go = tmp_path / "go"
    large = asyncio.create_task(workers.run(body_functions.wait_for_file, go, LARGE))
    await until(go.with_suffix(".begun").exists, "the work")
    second = asyncio.create_task(workers.run(body_functions.touch, tmp_path / "second", LARGE))
    await until(lambda: waiting(workers) == 1, "the second large one")
    pid, _, _ = await within(workers.run(body_functions.where, None, b"small"), "the small one")
    assert pid in workers.pids
    assert not (tmp_path / "second").exists()
    go.touch()
    await within(asyncio.gather(large, second), "the large ones")


async def test_what_waits_is_bounded_in_bytes(start_workers: StartWorkers, tmp_path: Path) -> None:
    workers = start_workers(max_waiting_bytes=100)
    go = tmp_path / "go"
    running = asyncio.create_task(workers.run(body_functions.wait_for_file, go, bytes(100)))
    await until(go.with_suffix(".begun").exists, "the work")
    waits = asyncio.create_task(workers.run(body_functions.where, None, bytes(60)))
    await until(lambda: waiting(workers) == 1, "the waiting one")
    with pytest.raises(TooManyBodiesError, match="60 bytes of request bodies wait already"):
        await workers.run(body_functions.where, None, bytes(41))
    go.touch()
    await within(asyncio.gather(running, waits), "the others")
