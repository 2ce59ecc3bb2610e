"""Real connections of a router to workers that come and go by the hundred: nothing stays open."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import psutil
import pytest

from cluster.members import WorkerRecord
from cluster.rpc import RpcConnection, RpcServer
from router.cluster_view import ClusterView
from tests.router.factories import members_of, worker_record

NUM_WORKERS = 400  # three sockets each: more than ZeroMQ opens unless it is told to


@pytest.fixture
def _enough_files() -> Iterator[None]:
    """Three a worker, and some; many systems allow 1024 until a process asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def worker() -> AsyncIterator[str]:
    """The address of one that answers."""
    server = RpcServer(sender="w0", incarnation=1, on_message=lambda *_: None)
    yield await server.bind("tcp://127.0.0.1:0")
    await server.close()


@pytest.fixture
async def view() -> AsyncIterator[ClusterView]:
    view = ClusterView(
        connect=lambda record, on_message, on_disconnected: RpcConnection(
            record.address,
            sender="router-0",
            incarnation=1,
            on_message=on_message,
            on_disconnected=on_disconnected,
        ),
        on_tokens=lambda *_: None,
        on_worker_lost=lambda _: None,
        on_dropped=lambda _: None,
    )
    yield view
    view.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 — the kernel sets no event
            await asyncio.sleep(0.01)


def records(address: str) -> list[WorkerRecord]:
    return [msgspec.structs.replace(worker_record(f"w{i}"), address=address) for i in range(NUM_WORKERS)]


async def opened_by_one(view: ClusterView, address: str) -> int:
    """Open files once ZeroMQ has its own, which it keeps."""
    view.update(members_of(*records(address)[:1]))
    view.update(members_of())
    return psutil.Process().num_fds()


@pytest.mark.parametrize("answers", [True, False])
async def test_workers_that_come_and_go_leave_nothing_open(
    view: ClusterView, worker: str, answers: bool
) -> None:
    address = worker if answers else "tcp://127.0.0.1:1"
    before = await opened_by_one(view, address)
    for record in records(address):
        view.update(members_of(record))
        await asyncio.sleep(0)
    view.update(members_of())
    await until(lambda: psutil.Process().num_fds() <= before)


@pytest.mark.usefixtures("_enough_files")
async def test_hundreds_at_once_are_all_connected_and_all_closed(view: ClusterView, worker: str) -> None:
    before = await opened_by_one(view, worker)
    view.update(members_of(*records(worker)))
    assert len(view.state.workers) == NUM_WORKERS
    assert view.incompatible == ()
    assert psutil.Process().num_fds() > before + NUM_WORKERS
    view.update(members_of())
    await until(lambda: psutil.Process().num_fds() <= before)


async def test_a_worker_that_cannot_be_connected_harms_no_other(
    view: ClusterView, worker: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A host name would be looked up in the one thread that moves everybody's messages."""
    named = msgspec.structs.replace(worker_record("named"), address="tcp://no-such-host.invalid:5701")
    good = msgspec.structs.replace(worker_record("z-good"), address=worker)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            view.update(members_of(named, good))
    assert [one.record.id for one in view.state.workers] == ["z-good"]
    (refused,) = view.incompatible
    assert refused.workers == ("named",)
    assert "'tcp://no-such-host.invalid:5701' is no address of a worker" in refused.reason
    assert len(caplog.records) == 1
