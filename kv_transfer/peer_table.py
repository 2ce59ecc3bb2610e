"""A transport's current peers, and why former ones are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from cluster.kv_layout import KvLayout
from cluster.members import Peer, WorkerRecord
from kv_transfer.transport import TransferError

ConnectionT = TypeVar("ConnectionT")

_MAX_GONE = 256  # former peers whose reason is kept for error messages


class PeerTable(Generic[ConnectionT]):
    """Connections by peer, at most one incarnation per worker.

    One thread writes, any thread may read. A ``snapshot()`` never changes once returned.
    """

    def __init__(self) -> None:
        self._connections: Mapping[Peer, ConnectionT] = MappingProxyType({})
        self._gone: OrderedDict[Peer, str] = OrderedDict()

    def snapshot(self) -> Mapping[Peer, ConnectionT]:
        """The current peers in the order they were added."""
        return self._connections

    def get(self, peer: Peer) -> ConnectionT | None:
        """The connection of ``peer``; None if it is no current peer."""
        return self._connections.get(peer)

    def incarnation_of(self, worker_id: str) -> Peer | None:
        """The current incarnation of a worker; None if there is none."""
        return next((peer for peer in self._connections if peer.worker_id == worker_id), None)

    def require(self, peer: Peer) -> ConnectionT:
        """The connection of ``peer``. Raises ``TransferError`` saying why there is none."""
        connection = self._connections.get(peer)
        if connection is not None:
            return connection
        reason = self._gone.get(peer)
        if reason is not None:
            raise TransferError(f"{describe(peer)} is no longer a peer: {reason}")
        known = ", ".join(describe(other) for other in self._connections) or "none"
        raise TransferError(f"{describe(peer)} is not a peer; current peers: {known}")

    def add(self, peer: Peer, connection: ConnectionT) -> None:
        """Make ``peer`` current. Its worker must have no current incarnation."""
        assert self.incarnation_of(peer.worker_id) is None
        self._gone.pop(peer, None)
        self._connections = MappingProxyType({**self._connections, peer: connection})

    def remove(self, peer: Peer, reason: str) -> None:
        """Forget ``peer`` and remember ``reason`` for a while."""
        self._connections = MappingProxyType(
            {other: connection for other, connection in self._connections.items() if other != peer}
        )
        self._gone[peer] = reason
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)


def describe(peer: Peer) -> str:
    """A peer as error messages and logs name it."""
    return f"{peer.worker_id}@{peer.incarnation}"


def check_peer_record(record: WorkerRecord, *, kind: str, layout: KvLayout, own: Peer) -> None:
    """Raise ``TransferError`` if blocks cannot be copied into the cache that ``record`` describes."""
    peer = Peer(record.id, record.incarnation)
    if record.transport != kind:
        raise TransferError(
            f"{describe(peer)} is reachable over {record.transport!r}, this worker over {kind!r}"
        )
    if record.kv_layout != layout:
        raise TransferError(
            f"{describe(peer)} has another KV layout: {record.kv_layout}, this worker has {layout}"
        )
    if record.id == own.worker_id:
        raise TransferError(f"{describe(peer)} is this worker itself ({describe(own)})")
