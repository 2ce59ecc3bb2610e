"""A worker's peer connections over a transport that moves nothing, and the workers it may meet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from cluster.kv_layout import KvLayout
from cluster.members import ModelIdentity, Peer, Role, TransportEndpoint, WorkerRecord
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import TransferError

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
NUM_BLOCKS = 4


class FakeTransport:
    """What ``PeerConnections`` uses of a transport; ``network`` has those that are open, by agent name.

    Everything happens at once, in the caller's thread.
    """

    def __init__(self, network: dict[str, FakeTransport], agent_name: str) -> None:
        self.peers: dict[Peer, str] = {}  # their agents
        self.num_peers_added = 0
        self._network = network
        self._agent_name = agent_name
        network[agent_name] = self

    def add_peer(self, record: WorkerRecord) -> Future[None]:
        future: Future[None] = Future()
        peer, agent_name = Peer(record.id, record.incarnation), record.endpoints[0].agent_name
        if agent_name not in self._network:
            future.set_exception(TransferError(f"cannot connect to {record.id}@{record.incarnation}"))
            return future
        if peer not in self.peers:
            assert peer.worker_id not in {other.worker_id for other in self.peers}, "lose the old one first"
            self.peers[peer] = agent_name
            self.num_peers_added += 1
        future.set_result(None)
        return future

    def remove_peer(self, peer: Peer) -> Future[None]:
        self.peers.pop(peer, None)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def writes_reach(self, peer: Peer) -> bool:
        """Whether a write to a peer succeeds; if not, the peer is dropped, as a transport does."""
        if self.peers[peer] in self._network:
            return True
        del self.peers[peer]
        return False

    def close(self) -> None:
        self._network.pop(self._agent_name, None)


class Worker:
    """A transport, as one incarnation of one worker has it."""

    def __init__(
        self,
        network: dict[str, FakeTransport],
        worker_id: str,
        role: Role,
        *,
        incarnation: int = 1,
        transport_type: type[FakeTransport] = FakeTransport,
    ) -> None:
        self.transport = transport_type(network, f"{worker_id}@{incarnation}")
        self.peer = Peer(worker_id, incarnation)
        self.record = record(worker_id, role, incarnation)


def record(
    worker_id: str,
    role: Role,
    incarnation: int = 1,
    *,
    endpoint: TransportEndpoint | None = None,
    fingerprint: str = "f",
) -> WorkerRecord:
    """Where ``endpoint`` is left out, that of an agent that may or may not exist under the usual name."""
    return WorkerRecord(
        id=worker_id,
        incarnation=incarnation,
        role=role,
        pid=1,
        host="localhost",
        address=f"tcp://127.0.0.1:{5000 + incarnation}",
        metrics_address="",
        model=ModelIdentity(
            name="m",
            source="m",
            fingerprint=fingerprint,
            dtype="float32",
            max_model_len=8,
            vocab_size=100,
            eos_token_ids=(2,),
        ),
        kv_layout=LAYOUT,
        endpoints=(
            endpoint
            or TransportEndpoint(
                kind="nixl",
                agent_name=f"{worker_id}@{incarnation}",
                metadata=b"",
                base_address=1,
                num_blocks=NUM_BLOCKS,
            ),
        ),
    )


class Harness:
    """One prefill worker's connections, and what they told it. Posted functions run in ``pump`` only."""

    def __init__(self, transport_type: type[FakeTransport] = FakeTransport) -> None:
        self.network: dict[str, FakeTransport] = {}
        self.own = self.start("p0", "prefill", transport_type=transport_type)
        self.events: list[tuple[str, Peer]] = []
        self.alive: set[Peer] = set()  # whose processes exist, whatever the registry says
        self.num_checks = 0
        self.checks_wait = False  # for ``answer_checks``, else they are answered at once
        self._checks: list[tuple[Peer, Future[bool]]] = []
        self._posted: list[Callable[[], None]] = []
        self.connections = PeerConnections(
            self.own.transport,  # type: ignore[arg-type]
            self.own.record,
            post=self._posted.append,
            check_gone=self._check_gone,
            on_connected=self._connected,
            on_lost=self._lost,
        )

    def start(
        self,
        worker_id: str,
        role: Role = "decode",
        *,
        incarnation: int = 1,
        transport_type: type[FakeTransport] = FakeTransport,
    ) -> Worker:
        return Worker(self.network, worker_id, role, incarnation=incarnation, transport_type=transport_type)

    def _check_gone(self, absent: WorkerRecord) -> Future[bool]:
        self.num_checks += 1
        self._checks.append((Peer(absent.id, absent.incarnation), Future()))
        future = self._checks[-1][1]
        if not self.checks_wait:
            self.answer_checks()
        return future

    def answer_checks(self, error: Exception | None = None) -> None:
        """Say whether the processes in question are gone by now, or fail to find out."""
        checks, self._checks = self._checks, []
        for peer, future in checks:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(peer not in self.alive)

    def _connected(self, peer: Peer, connected: WorkerRecord) -> None:
        assert (connected.id, connected.incarnation) == (peer.worker_id, peer.incarnation)
        assert self.connections.get(peer.worker_id) == peer, "it is connected when that is told"
        assert peer in self.agents, "it can be written to when that is told"
        self.events.append(("connected", peer))

    def _lost(self, peer: Peer) -> None:
        assert self.connections.get(peer.worker_id) != peer
        assert peer not in self.agents, "it cannot be written to any more when that is told"
        assert peer not in self.alive, "it cannot write any more when that is told"
        self.events.append(("lost", peer))

    @property
    def agents(self) -> list[Peer]:
        """The peers that the transport itself knows."""
        return list(self.own.transport.peers)

    def pump(self, num_completions: int = 1) -> None:
        """Run that many of the completions that the transport posted."""
        for _ in range(num_completions):
            self._posted.pop(0)()

    def is_quiet(self) -> bool:
        return not self._posted

    def update(self, *records: WorkerRecord, completions: int = 0) -> None:
        self.connections.update(records)
        self.pump(completions)

    def take_events(self) -> list[tuple[str, Peer]]:
        events, self.events = self.events, []
        return events
