"""A worker shell on real sockets with a registry in memory and a clock that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

from cluster.clock import ManualClock
from cluster.kv_layout import KvLayout
from cluster.load import LoadReport
from cluster.malformed import MalformedMessage
from cluster.members import (
    Members,
    ModelIdentity,
    RouterRecord,
    TransportEndpoint,
    WorkerRecord,
)
from cluster.messages import Cancel, Envelope, KvEvents, LoadUpdate, Message, Subscribe
from cluster.registry import Registry
from cluster.rpc import RpcConnection
from cluster.sequence_spec import RequestKey
from cluster.worker_shell import WorkerShell

LEASE_S = 5.0


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


class Router:
    """A router's connection to the worker; keeps what it is sent."""

    def __init__(self, address: str, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.received: list[Message] = []
        self.connection = RpcConnection(
            address, sender=name, incarnation=incarnation, on_message=self._receive
        )

    def _receive(self, envelope: Envelope) -> None:
        self.received.append(envelope.message)

    @property
    def kv_events(self) -> list[KvEvents]:
        return [message for message in self.received if isinstance(message, KvEvents)]

    @property
    def loads(self) -> list[LoadReport]:
        return [message.load for message in self.received if isinstance(message, LoadUpdate)]


class Harness:
    """A shell with its registry, clock and routers, and what it told its role."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.clock = ManualClock(monotonic=100.0)
        self.messages: list[tuple[str, int, Message]] = []
        self.malformed: list[tuple[str, int, MalformedMessage]] = []
        self.members: list[Members] = []
        self.lost: list[tuple[str, int]] = []
        self.answer_to_the_lost: Message | None = None  # sent to a router when its loss is told
        self.num_drains = 0
        self.members_error: Exception | None = None
        self.routers: list[Router] = []
        self.address = ""
        self.shell = WorkerShell(
            worker_id="w0",
            incarnation=1,
            registry=cast("Registry", self.registry),
            lease_s=LEASE_S,
            clock=self.clock,
            on_message=lambda *message: self.messages.append(message),
            on_members=self._take_members,
            on_router_lost=self._lose,
            on_drain=self._drain,
            on_malformed=lambda *malformed: self.malformed.append(malformed),
        )

    def _lose(self, router: str, incarnation: int) -> None:
        self.lost.append((router, incarnation))
        if self.answer_to_the_lost is not None:
            assert self.shell.send(router, self.answer_to_the_lost)

    def _drain(self) -> None:
        self.num_drains += 1

    def _take_members(self, members: Members) -> None:
        self.members.append(members)
        if self.members_error is not None:
            raise self.members_error

    def router(self, name: str = "r0", incarnation: int = 1) -> Router:
        self.routers.append(Router(self.address, name, incarnation))
        return self.routers[-1]

    async def subscribed(self, name: str = "r0", incarnation: int = 1) -> Router:
        """A router that has its first snapshot."""
        router = self.router(name, incarnation)
        router.connection.send(Subscribe())
        await until(lambda: bool(router.kv_events), "the snapshot")
        return router

    async def renew(self, router: Router, *, snapshot: bool = False) -> None:
        """Renew a subscription, and wait until the worker has heard it."""
        router.connection.send(Subscribe(snapshot=snapshot))
        await self.heard(router)

    async def heard(self, router: Router) -> None:
        """Wait until the worker has handled everything this router has sent."""
        num_messages = len(self.messages)
        router.connection.send(Cancel(key=RequestKey("marker", 0)))
        await until(lambda: len(self.messages) > num_messages, "the marker")
        self.messages.pop()

    async def arrived(self, router: Router) -> None:
        """Wait until everything sent to the router has arrived there."""
        marker = Cancel(key=RequestKey("marker", 0))
        assert self.shell.send(router.name, marker)
        await until(lambda: router.received[-1:] == [marker], "the marker")
        router.received.pop()

    async def publish_members(self, *routers: RouterRecord) -> None:
        num_lists = len(self.members)
        self.registry.publish(Members(routers=routers))
        await until(lambda: len(self.members) > num_lists, "the members")


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fails with ``what`` where it does not."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"waited in vain for {what}")


def worker_record(address: str) -> WorkerRecord:
    return WorkerRecord(
        id="w0",
        incarnation=1,
        role="decode",
        pid=1,
        host="localhost",
        address=address,
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


def router_record(name: str = "r0", incarnation: int = 1) -> RouterRecord:
    return RouterRecord(id=name, incarnation=incarnation, pid=2, host="localhost", address="http://localhost")


def block(number: int) -> bytes:
    return number.to_bytes(32)
