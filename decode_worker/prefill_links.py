"""Message connections from a decode worker to the prefill workers it is connected with."""

from __future__ import annotations

from collections.abc import Callable

from cluster.members import Peer, WorkerRecord
from cluster.messages import Envelope, Message
from cluster.network import Connection, Network
from cluster.rpc import RpcError


class PrefillLinks:
    """One connection per connected prefill worker. Lives in the worker's event loop."""

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
        self._connections: dict[Peer, Connection] = {}
        self._by_id: dict[str, Peer] = {}

    def get(self, worker_id: str) -> Peer | None:
        """The connected prefill worker of that id; None if there is none."""
        return self._by_id.get(worker_id)

    def open(self, peer: Peer, record: WorkerRecord) -> None:
        """Connect to a prefill worker that may write here. Harmless if it is connected."""
        if peer in self._connections:
            return

        def receive(envelope: Envelope) -> None:
            # Under the old address may answer a new incarnation: its word does not count for the old one.
            if envelope.sender == peer.worker_id and envelope.incarnation == peer.incarnation:
                self._on_message(peer, envelope.message)

        self._connections[peer] = self._network.connect(record, receive, lambda: self._on_unreachable(peer))
        self._by_id[peer.worker_id] = peer

    def close(self, peer: Peer) -> None:
        """Disconnect from a prefill worker that is gone."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()
        if self._by_id.get(peer.worker_id) == peer:
            del self._by_id[peer.worker_id]

    def close_all(self) -> None:
        """Disconnect from all."""
        for peer in list(self._connections):
            self.close(peer)

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message for a prefill worker. Raises RpcError if it is gone or does not keep up."""
        connection = self._connections.get(peer)
        if connection is None:
            raise RpcError(f"prefill worker {peer.worker_id} is gone")
        connection.send(message)
