"""Message connections from a worker's decode role to the workers that it has compute prompts."""

from __future__ import annotations

from collections.abc import Callable

from cluster.members import Peer, WorkerRecord
from cluster.messages import Envelope, Message
from cluster.network import Connection, Network
from cluster.rpc import RpcError


class PrefillLinks:
    """A connection per worker that prompts are handed to, made for the first one. Lives in the event loop."""

    def __init__(
        self,
        network: Network,
        *,
        on_message: Callable[[Peer, Message], None],
        on_unreachable: Callable[[Peer], None],
    ) -> None:
        """``on_unreachable``: the connection broke. It may come back by itself."""
        self._network = network
        self._on_message = on_message
        self._on_unreachable = on_unreachable
        self._records: dict[Peer, WorkerRecord] = {}
        self._connections: dict[Peer, Connection] = {}
        self._by_id: dict[str, Peer] = {}

    def get(self, worker_id: str) -> Peer | None:
        """The worker of that id, if it may write here; None if there is none."""
        return self._by_id.get(worker_id)

    def add(self, peer: Peer, record: WorkerRecord) -> None:
        """A worker may write here from now on. Harmless if that is known."""
        self._records[peer] = record
        self._by_id[peer.worker_id] = peer

    def remove(self, peer: Peer) -> None:
        """Disconnect from a worker that is gone."""
        self._records.pop(peer, None)
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()
        if self._by_id.get(peer.worker_id) == peer:
            del self._by_id[peer.worker_id]

    def close_all(self) -> None:
        """Disconnect from all."""
        for peer in list(self._records):
            self.remove(peer)

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message for a worker. Raises RpcError if it is gone or does not keep up."""
        if peer not in self._records:
            raise RpcError(f"worker {peer.worker_id} is gone")
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = self._connect(peer)
        connection.send(message)

    def _connect(self, peer: Peer) -> Connection:
        def receive(envelope: Envelope) -> None:
            # Under the old address may answer a new incarnation: its word does not count for the old one.
            if envelope.sender == peer.worker_id and envelope.incarnation == peer.incarnation:
                self._on_message(peer, envelope.message)

        return self._network.connect(self._records[peer], receive, lambda: self._on_unreachable(peer))
