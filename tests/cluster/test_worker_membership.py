"""A worker's place in the registry: a registry in memory that a test commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from cluster import worker_membership
from cluster.clock import ManualClock
from cluster.kv_layout import KvLayout
from cluster.members import Members, ModelIdentity, RouterRecord, TransportEndpoint, WorkerRecord
from cluster.registry import Registry, RegistryUnavailableError
from cluster.worker_membership import WorkerMembership
from tests.cluster.shell_harness import router_record, until


def worker_record() -> WorkerRecord:
    return WorkerRecord(
        id="w0",
        incarnation=1,
        role="decode",
        pid=1,
        host="localhost",
        address="tcp://127.0.0.1:5701",
        metrics_address="",
        model=ModelIdentity(
            name="m",
            source="m",
            fingerprint="f",
            dtype="float32",
            max_model_len=128,
            vocab_size=100,
            eos_token_ids=(2,),
        ),
        kv_layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
        endpoints=(
            TransportEndpoint(kind="nixl", agent_name="w0", metadata=b"", base_address=1, num_blocks=2),
        ),
    )


class MemoryRegistry:
    """What a shell uses of the registry. ``publish`` makes the next list of members."""

    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []
        self.withdraw_error: Exception | None = None
        self.num_watchers = 0
        self.num_watches = 0
        self._lists: asyncio.Queue[Members | Exception] = asyncio.Queue()

    def publish(self, members: Members | Exception) -> None:
        self._lists.put_nowait(members)

    async def register(self, record: WorkerRecord) -> None:
        self.records.append(record)

    async def withdraw(self, record: WorkerRecord) -> None:
        if self.withdraw_error is not None:
            raise self.withdraw_error
        self.records.remove(record)

    async def watch(self) -> AsyncIterator[Members]:
        self.num_watchers += 1
        self.num_watches += 1
        try:
            while True:
                members = await self._lists.get()
                if isinstance(members, Exception):
                    raise members
                yield members
        finally:
            self.num_watchers -= 1


class Harness:
    """A registered worker, and the lists of members that it has taken over."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.members: list[Members] = []
        self.members_error: Exception | None = None
        self.membership = WorkerMembership(cast("Registry", self.registry), ManualClock(), self._take_members)

    def _take_members(self, members: Members) -> None:
        self.members.append(members)
        if self.members_error is not None:
            raise self.members_error

    async def publish_members(self, *routers: RouterRecord) -> None:
        num_lists = len(self.members)
        self.registry.publish(Members(routers=routers))
        await until(lambda: len(self.members) > num_lists, "the members")


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    await harness.membership.register(worker_record())
    yield harness
    await harness.membership.withdraw()


async def test_register_enters_the_registry_and_follows_it(harness: Harness) -> None:
    assert harness.registry.records == [worker_record()]
    await harness.publish_members(router_record())
    await harness.publish_members()
    assert [len(members.routers) for members in harness.members] == [1, 0]


async def test_a_failing_listener_does_not_end_the_watch(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.members_error = RuntimeError("a broken listener")
    await harness.publish_members()
    harness.members_error = None
    await harness.publish_members()
    assert len(harness.members) == 2
    assert "a broken listener" in caplog.text
    assert harness.registry.num_watches == 1


async def test_a_failing_watch_is_started_again(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_membership, "_WATCH_RETRY_S", 0.0)
    harness.registry.publish(RuntimeError("a broken registry"))
    await harness.publish_members(router_record())
    assert harness.registry.num_watches == 2
    assert "a broken registry" in caplog.text


async def test_withdraw_leaves_the_registry_and_ends_the_watch(harness: Harness) -> None:
    await harness.membership.withdraw()
    assert harness.registry.records == []
    await until(lambda: harness.registry.num_watchers == 0, "the end of the watch")


async def test_withdraw_survives_an_unreachable_registry(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.registry.withdraw_error = RegistryUnavailableError("nobody answers")
    await harness.membership.withdraw()
    assert "the lease will end: nobody answers" in caplog.text


async def test_withdraw_before_registration() -> None:
    harness = Harness()
    await harness.membership.withdraw()
    assert harness.registry.num_watches == 0
