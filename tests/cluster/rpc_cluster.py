"""Servers and connections on real sockets that keep what they are sent, for the RPC tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.malformed import MalformedMessage
from cluster.messages import Cancel, Envelope, Message
from cluster.rpc import RpcConnection, RpcError, RpcServer
from cluster.sequence_spec import RequestKey

LOCALHOST = "tcp://127.0.0.1:0"


def numbered(number: int) -> Cancel:
    return Cancel(key=RequestKey(f"r{number}", number))


def numbers(messages: list[Message]) -> list[int]:
    return [message.key.attempt for message in messages if isinstance(message, Cancel)]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fails with ``what`` where it does not."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"waited in vain for {what}")


class Worker:
    """A server that records what it is sent, and may answer it."""

    def __init__(self, incarnation: int = 1) -> None:
        self.received: list[tuple[str, int, Message]] = []
        self.malformed: list[tuple[str, int, MalformedMessage]] = []
        self.react: Callable[[str, Message], None] = lambda peer, message: None
        self.server = RpcServer(
            sender="worker",
            incarnation=incarnation,
            on_message=self._receive,
            on_malformed=lambda *malformed: self.malformed.append(malformed),
        )

    def _receive(self, peer: str, incarnation: int, message: Message) -> None:
        self.received.append((peer, incarnation, message))
        self.react(peer, message)

    def messages_of(self, peer: str) -> list[Message]:
        return [message for sender, _, message in self.received if sender == peer]


class Client:
    """A connection that records what it is sent, and may react to it."""

    def __init__(self, address: str, sender: str = "router", incarnation: int = 1) -> None:
        self.envelopes: list[Envelope] = []
        self.num_disconnections = 0
        self.react: Callable[[Envelope], None] = lambda envelope: None
        self.connection = RpcConnection(
            address,
            sender=sender,
            incarnation=incarnation,
            on_message=self._receive,
            on_disconnected=self._disconnected,
        )

    def _receive(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)
        self.react(envelope)

    def _disconnected(self) -> None:
        self.num_disconnections += 1

    @property
    def messages(self) -> list[Message]:
        return [envelope.message for envelope in self.envelopes]


class Cluster:
    """Opens servers and connections and closes what a test leaves open."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._clients: list[Client] = []

    async def worker(self, address: str = LOCALHOST, incarnation: int = 1) -> tuple[Worker, str]:
        worker = Worker(incarnation)
        self._workers.append(worker)
        return worker, await worker.server.bind(address)

    async def worker_again(self, address: str, incarnation: int) -> Worker:
        """At an address that was just given up: its socket closes in the background."""
        while True:
            try:
                return (await self.worker(address, incarnation))[0]
            except RpcError:
                await asyncio.sleep(0.01)

    def client(self, address: str, sender: str = "router", incarnation: int = 1) -> Client:
        self._clients.append(Client(address, sender, incarnation))
        return self._clients[-1]

    async def known_client(
        self, worker: Worker, address: str, sender: str = "router", incarnation: int = 1
    ) -> Client:
        """A client that the worker has heard of."""
        client = self.client(address, sender, incarnation)
        num_received = len(worker.received)
        client.connection.send(numbered(-1))
        await until(lambda: len(worker.received) > num_received, f"the first message of {sender}")
        worker.received.clear()
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.connection.close()
        for worker in self._workers:
            await worker.server.close()
