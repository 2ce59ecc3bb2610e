"""A worker shell on real sockets with a clock that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.clock import ManualClock
from cluster.load import LoadReport
from cluster.malformed import MalformedMessage
from cluster.members import Role, RouterRecord
from cluster.messages import Cancel, Envelope, KvEvents, LoadUpdate, Message, Subscribe
from cluster.rpc import RpcConnection, ZmqNetwork
from cluster.sequence_spec import RequestKey
from cluster.worker_shell import WorkerShell

LEASE_S = 5.0


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
        self.clock = ManualClock(monotonic=100.0)
        self.messages: list[tuple[str, int, Message]] = []
        self.malformed: list[tuple[str, int, MalformedMessage]] = []
        self.lost: list[tuple[str, int]] = []
        self.answer_to_the_lost: Message | None = None  # sent to a router when its loss is told
        self.num_drains = 0
        self.roles: list[Role] = []
        self.routers: list[Router] = []
        self.address = ""
        self.shell = WorkerShell(
            ZmqNetwork("w0", 1),
            self.clock,
            lease_s=LEASE_S,
            on_message=lambda *message: self.messages.append(message),
            on_router_lost=self._lose,
            on_drain=self._drain,
            on_set_role=self.roles.append,
            on_malformed=lambda *malformed: self.malformed.append(malformed),
        )

    def _lose(self, router: str, incarnation: int) -> None:
        self.lost.append((router, incarnation))
        if self.answer_to_the_lost is not None:
            assert self.shell.send(router, self.answer_to_the_lost)

    def _drain(self) -> None:
        self.num_drains += 1

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


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fails with ``what`` where it does not."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"waited in vain for {what}")


def router_record(name: str = "r0", incarnation: int = 1) -> RouterRecord:
    return RouterRecord(id=name, incarnation=incarnation, pid=2, host="localhost", address="http://localhost")


def block(number: int) -> bytes:
    return number.to_bytes(32)
