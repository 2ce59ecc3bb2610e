"""The workers that KV may be handed over to or taken from: connected when registered, removed when gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from cluster.members import Peer, WorkerRecord, incompatibility
from cluster.problem_log import ProblemLog
from kv_transfer.transport import TransferError, Transport

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Connection:
    record: WorkerRecord
    state: Literal["connecting", "connected", "failed", "leaving"] = "connecting"
    was_connected: bool = False
    is_being_checked: bool = False  # whether its process is gone
    is_known_to_hang: bool = False  # absent from the registry, but not gone
    is_announced: bool = False  # as connected, and not absent since

    @property
    def peer(self) -> Peer:
        return Peer(self.record.id, self.record.incarnation)


class PeerConnections:
    """Follows the registry's list of workers and keeps the transport connected to the compatible ones.

    Roles do not matter, for they change. A worker under a known id with a larger incarnation is another peer:
    the old one is lost first. Not thread-safe: ``post`` brings completions back to the caller's thread.

    A worker that the registry no longer lists may only be frozen, or cut off from the registry, and still
    write into blocks here. So its agent is kept, and it is not lost, until ``check_gone`` says that it is.
    """

    def __init__(
        self,
        transport: Transport,
        own: WorkerRecord,
        *,
        post: Callable[[Callable[[], None]], None],
        check_gone: Callable[[WorkerRecord], Future[bool]],
        on_connected: Callable[[Peer, WorkerRecord], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        """``on_lost`` runs once the peer is gone *and* its agent is removed here: it cannot write any more.

        ``on_connected`` runs again where a failed connection was renewed or an absent worker came back, and
        not at all for a worker that left before it was connected. ``check_gone`` says whether a worker's
        process can do nothing any more.
        """
        self._transport = transport
        self._own = own
        self._post = post
        self._check_gone = check_gone
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._connections: dict[str, _Connection] = {}
        self._refused: dict[str, str] = {}  # the incompatible workers in the last list, and why
        self._listed: dict[str, WorkerRecord] = {}  # all workers in the last list
        self._wanted: dict[str, WorkerRecord] = {}  # the compatible ones among them
        self._problems = ProblemLog(logger)

    def get(self, worker_id: str) -> Peer | None:
        """The connected and registered peer of that id; None if there is none."""
        connection = self._connections.get(worker_id)
        if connection is None or connection.state != "connected" or not self._is_registered(connection):
            return None
        return connection.peer

    @property
    def doubted(self) -> frozenset[Peer]:
        """Peers that are not registered any more, but not known to be gone."""
        return frozenset(
            connection.peer
            for connection in self._connections.values()
            if connection.is_being_checked or connection.is_known_to_hang
        )

    @property
    def is_settled(self) -> bool:
        """Whether no connection is being set up."""
        return all(connection.state != "connecting" for connection in self._connections.values())

    def update(self, workers: Sequence[WorkerRecord]) -> None:
        """Take the current list of registered workers. Failed connections are tried again."""
        self._listed = {record.id: record for record in workers}
        self._wanted = wanted = self._compatible(workers)
        for connection in list(self._connections.values()):
            if not self._is_registered(connection):
                self._doubt(connection)
                continue
            if connection.is_known_to_hang:
                connection.is_known_to_hang = False
                record = connection.record
                self._problems.over(("absent", connection.peer), "worker %s is back", record.id)
            if connection.state == "connected" and not connection.is_announced:
                self._announce(connection)
        for worker_id, record in wanted.items():
            known = self._connections.get(worker_id)
            if known is None:
                self._connect(_Connection(record))
            elif known.state == "failed" and record.incarnation == known.record.incarnation:
                self._connect(known)

    def mark_failed(self, peer: Peer) -> None:
        """A write to a connected peer failed and the transport dropped it: connect anew while registered."""
        connection = self._connections.get(peer.worker_id)
        if connection is not None and connection.peer == peer and connection.state == "connected":
            connection.state = "failed"

    def _compatible(self, workers: Sequence[WorkerRecord]) -> dict[str, WorkerRecord]:
        """By id, without this worker itself. Why another is left out is logged when it is first listed."""
        compatible: dict[str, WorkerRecord] = {}
        refused: dict[str, str] = {}
        for record in workers:
            if record.id == self._own.id:
                continue
            reason = incompatibility(self._own, record)
            if reason is None:
                compatible[record.id] = record
                continue
            refused[record.id] = reason
            if self._refused.get(record.id) != reason:
                message = "worker %s is not compatible: %s"
                self._problems.report(("incompatible", record.id, reason), message, record.id, reason)
        self._refused = refused
        return compatible

    def _connect(self, connection: _Connection) -> None:
        connection.state, connection.is_announced = "connecting", False
        self._connections[connection.record.id] = connection
        future = self._transport.add_peer(connection.record)
        future.add_done_callback(lambda done: self._post(lambda: self._connect_done(connection, done)))

    def _connect_done(self, connection: _Connection, future: Future[None]) -> None:
        if connection.state != "connecting":
            return
        error = future.exception()
        if error is None:
            connection.state, connection.was_connected = "connected", True
            logger.info("connected to worker %s", connection.record.id)
            if self._is_registered(connection):
                self._announce(connection)
            return
        connection.state = "failed"
        key = ("connect", connection.record.id)
        if not isinstance(error, TransferError):
            message, level = "connecting to %s failed", logging.ERROR
            self._problems.report(key, message, connection.record.id, level=level, error=error)
        else:
            message = "connecting to %s failed, will retry: %s"
            self._problems.report(key, message, connection.record.id, error)

    def _doubt(self, connection: _Connection) -> None:
        """It is not registered any more. ``update`` asks again while its process is not known to be gone."""
        if connection.state == "leaving" or connection.is_being_checked:
            return
        if connection.state == "failed" and not connection.was_connected:
            # Nothing was ever begun with it, and the transport does not know it.
            del self._connections[connection.record.id]
            return
        successor = self._listed.get(connection.record.id)
        if (
            successor is not None
            and successor.incarnation > connection.record.incarnation
            and successor.address == connection.record.address
        ):
            self._leave(connection)  # an address has one listener: the old process has closed it
            return
        connection.is_being_checked = True
        future = self._check_gone(connection.record)
        if future.done():
            self._checked(connection, future)
        else:
            future.add_done_callback(lambda done: self._post(lambda: self._checked(connection, done)))

    def _checked(self, connection: _Connection, future: Future[bool]) -> None:
        connection.is_being_checked = False
        if self._is_registered(connection):
            return  # it is back
        if future.exception() is None and future.result():
            self._leave(connection)
        elif not connection.is_known_to_hang:
            connection.is_known_to_hang, connection.is_announced = True, False
            self._problems.report(
                ("absent", connection.peer),
                "worker %s has lost its lease, but is not known to be dead: blocks that it may still "
                "write stay in quarantine",
                connection.record.id,
            )

    def _is_registered(self, connection: _Connection) -> bool:
        """Whether the last list had it. An older incarnation in the list says nothing."""
        record = self._wanted.get(connection.record.id)
        return record is not None and record.incarnation <= connection.record.incarnation

    def _announce(self, connection: _Connection) -> None:
        connection.is_announced = True
        self._on_connected(connection.peer, connection.record)

    def _leave(self, connection: _Connection) -> None:
        connection.state, connection.was_connected = "leaving", True  # as good as: its agent may be loaded
        logger.info("worker %s has left", connection.record.id)
        future = self._transport.remove_peer(connection.peer)
        future.add_done_callback(lambda done: self._post(lambda: self._leave_done(connection, done)))

    def _leave_done(self, connection: _Connection, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            message, name = "removing the agent of %s failed", connection.record.id
            self._problems.report(("remove", name), message, name, level=logging.ERROR, error=error)
            connection.state = "failed"  # stays known: its blocks must not be reused; update() tries again
            return
        if self._connections.get(connection.record.id) is connection:
            del self._connections[connection.record.id]
        self._on_lost(connection.peer)
        successor = self._wanted.get(connection.record.id)
        if successor is not None and connection.record.id not in self._connections:
            self._connect(_Connection(successor))
