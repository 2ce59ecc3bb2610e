"""A router's place in the registry: outages of the registry, and standstills of the router itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from cluster.clock import ManualClock
from cluster.members import Members, RouterRecord, WorkerRecord
from cluster.registry import Registry, RegistryUnavailableError
from router import membership
from router.cluster_view import ClusterView
from router.membership import Membership
from tests.router.factories import worker_record
from tests.router.scripted_worker import until

HEARTBEAT_S = 0.01
MAX_STALL_S = 3.0
MAX_OUTAGE_S = 600.0
RECORD = RouterRecord(id="r0", incarnation=1, pid=1, host="localhost", address="http://localhost")


class MemoryRegistry:
    """What a membership uses of the registry."""

    def __init__(self) -> None:
        self.seconds_since_contact = 0.0
        self.register_error: Exception | None = None
        self.num_registrations = 0
        self.members: asyncio.Queue[Members] = asyncio.Queue()

    async def register(self, record: RouterRecord) -> None:
        self.num_registrations += 1
        if self.register_error is not None:
            raise self.register_error

    async def watch(self) -> AsyncIterator[Members]:
        while True:
            yield await self.members.get()


class RecordingView:
    """What a membership tells the view."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.workers: list[tuple[WorkerRecord, ...]] = []

    def update(self, members: Members) -> None:
        self.workers.append(members.workers)

    def heartbeat(self) -> None:
        self.calls.append("heartbeat")

    def suspect_all(self) -> None:
        self.calls.append("suspect_all")


class Harness:
    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.view = RecordingView()
        self.clock = ManualClock(monotonic=100.0)
        self.membership = Membership(
            cast("Registry", self.registry),
            RECORD,
            cast("ClusterView", self.view),
            self.clock,
            heartbeat_s=HEARTBEAT_S,
            max_stall_s=MAX_STALL_S,
            max_registry_outage_s=MAX_OUTAGE_S,
        )

    async def beat(self) -> list[str]:
        """The view's calls of the next heartbeat."""
        self.view.calls.clear()
        await until(lambda: "heartbeat" in self.view.calls, "a heartbeat")
        return list(self.view.calls)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    running = asyncio.create_task(harness.membership.run())
    yield harness
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


# --- the registry ------------------------------------------------------------------------------------------


async def test_members_are_a_problem_until_they_are_known(harness: Harness) -> None:
    assert harness.membership.problem == "the members of the cluster are not known yet"
    harness.registry.members.put_nowait(Members(workers=(worker_record("d0"),)))
    await until(lambda: harness.membership.problem == "", "the members")
    assert harness.view.workers == [(worker_record("d0"),)]


async def test_a_registry_that_does_not_answer_at_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_FIRST_RETRY_S", 0.001)
    harness = Harness()
    harness.registry.register_error = RegistryUnavailableError("registry redis://nowhere: refused")
    running = asyncio.create_task(harness.membership.run())
    await until(lambda: harness.registry.num_registrations >= 3, "some attempts to register")
    assert harness.membership.problem == "registry redis://nowhere: refused"
    harness.registry.register_error = None
    harness.registry.members.put_nowait(Members())
    await until(lambda: harness.membership.problem == "", "the members")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_without_the_registry_the_last_view_is_good_for_a_bounded_time(harness: Harness) -> None:
    harness.registry.members.put_nowait(Members())
    await until(lambda: harness.membership.problem == "", "the members")
    harness.registry.seconds_since_contact = MAX_OUTAGE_S
    assert harness.membership.problem == ""
    harness.registry.seconds_since_contact = MAX_OUTAGE_S + 0.6
    assert harness.membership.problem == "the registry has not answered for 601 s"
    harness.registry.seconds_since_contact = 3_600.0
    assert harness.membership.problem == "the registry has not answered for 3600 s"
    harness.registry.seconds_since_contact = 0.0
    assert harness.membership.problem == "", "it is back"


# --- standstills -------------------------------------------------------------------------------------------


async def test_heartbeats_renew_subscriptions(harness: Harness) -> None:
    for _ in range(3):
        harness.clock.advance(HEARTBEAT_S)
        assert await harness.beat() == ["heartbeat"]


@pytest.mark.parametrize("pause_s", [1.0, HEARTBEAT_S + MAX_STALL_S - 0.001])
async def test_a_short_pause_is_no_standstill(harness: Harness, pause_s: float) -> None:
    await harness.beat()
    harness.clock.advance(pause_s)
    for _ in range(2):
        assert await harness.beat() == ["heartbeat"]


async def test_after_a_standstill_everybody_is_suspected_once(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers may have ended its requests meanwhile. They are asked to subscribe it anew afterwards."""
    await harness.beat()
    harness.clock.advance(60.0)
    assert await harness.beat() == ["suspect_all", "heartbeat"]
    assert await harness.beat() == ["heartbeat"]
    assert "this router stood still for 60.0 s" in caplog.text
    harness.clock.advance(HEARTBEAT_S + MAX_STALL_S + 0.001)
    assert await harness.beat() == ["suspect_all", "heartbeat"], "another one"
