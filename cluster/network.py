"""How a process talks to others. It is given a network, so that a simulation can give it another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.malformed import MalformedMessage
from cluster.members import WorkerRecord
from cluster.messages import Envelope, Message


class Connection(Protocol):
    """A client's connection to one worker. What comes back is given to ``on_message`` of ``connect``."""

    def send(self, message: Message) -> None:
        """Queue one message. Raises RpcError if the worker cannot take it."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


# (worker, what takes its messages, what is called when an established connection breaks): see Network.connect
Connect = Callable[[WorkerRecord, Callable[[Envelope], None], Callable[[], None]], Connection]


class Server(Protocol):
    """A worker's side: what was sent to it is given to ``on_message`` of ``listen``.

    Messages of an older incarnation than the newest seen from their sender are dropped.
    """

    num_stale: int  # of an older incarnation, dropped
    num_malformed: int
    num_undeliverable: int

    async def bind(self, address: str) -> str:
        """Start to take messages; returns the real address. Raises RpcError if it cannot be had."""
        ...

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message for ``peer``; False if it never spoke to us, is gone, or does not keep up."""
        ...

    def forget(self, peer: str) -> None:
        """Drop what is known about a peer that left the cluster."""
        ...

    async def close(self) -> None:
        """Stop to take messages."""
        ...


class Network(Protocol):
    """One process's access to the others. ``cluster.rpc.ZmqNetwork`` is the real one."""

    def listen(
        self,
        on_message: Callable[[str, int, Message], None],
        on_malformed: Callable[[str, int, MalformedMessage], None],
    ) -> Server:
        """A server, not bound yet. ``on_message(peer, peer's incarnation, message)``.

        ``on_malformed`` gets a message that cannot be read, where it says at least whose request it is about.
        """
        ...

    def connect(
        self,
        worker: WorkerRecord,
        on_message: Callable[[Envelope], None],
        on_disconnected: Callable[[], None],
    ) -> Connection:
        """Connect to a worker in the background.

        ``on_disconnected``: an established connection broke; what was sent may be lost. It may come back.
        Raises RpcError where no connection can be opened.
        """
        ...
