"""A worker's peer connections over the in-process transport, and the workers it may meet."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cluster.kv_layout import KvLayout
from cluster.members import ModelIdentity, Role, TransportEndpoint, WorkerRecord
from kv_transfer.in_process_transport import InProcessNetwork, InProcessTransport
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import Peer

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
NUM_BLOCKS = 4


class Worker:
    """A transport with a KV cache, as one incarnation of one worker has it."""

    def __init__(
        self,
        network: InProcessNetwork,
        worker_id: str,
        role: Role,
        *,
        incarnation: int = 1,
        transport_type: type[InProcessTransport] = InProcessTransport,
        **transport_options: Any,
    ) -> None:
        self.cache = ctypes.create_string_buffer(NUM_BLOCKS * LAYOUT.block_bytes)
        self.transport = transport_type(
            network,
            agent_name=f"{worker_id}@{incarnation}",
            base_address=ctypes.addressof(self.cache),
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
            local_id=(worker_id, incarnation),
            **transport_options,
        )
        self.peer = Peer(worker_id, incarnation)
        self.record = record(worker_id, role, incarnation, endpoint=self.transport.endpoint)


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
        endpoint=endpoint
        or TransportEndpoint(
            kind="in_process",
            agent_name=f"{worker_id}@{incarnation}",
            metadata=b"",
            base_address=1,
            num_blocks=NUM_BLOCKS,
        ),
    )


class Harness:
    """One prefill worker's connections, and what they told it. Posted functions run in ``pump`` only."""

    def __init__(self, **own_options: Any) -> None:
        self.network = InProcessNetwork()
        self.workers: list[Worker] = []
        self.own = self.start("p0", "prefill", **own_options)
        self.events: list[tuple[str, Peer]] = []
        self.alive: set[Peer] = set()  # whose processes exist, whatever the registry says
        self.num_checks = 0
        self.checks_wait = False  # for ``answer_checks``, else they are answered at once
        self._checks: list[tuple[Peer, Future[bool]]] = []
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.connections = PeerConnections(
            self.own.transport,
            self.own.record,
            post=self._posted.put,
            check_gone=self._check_gone,
            on_connected=self._connected,
            on_lost=self._lost,
        )

    def start(self, worker_id: str, role: Role = "decode", **options: Any) -> Worker:
        self.workers.append(Worker(self.network, worker_id, role, **options))
        return self.workers[-1]

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
        return [info.peer for info in self.own.transport.peers()]

    def pump(self, num_completions: int = 1) -> None:
        """Run that many of the completions that the transport posts."""
        for _ in range(num_completions):
            self._posted.get(timeout=20)()

    def is_quiet(self) -> bool:
        return self._posted.empty()

    def update(self, *records: WorkerRecord, completions: int = 0) -> None:
        self.connections.update(records)
        self.pump(completions)

    def take_events(self) -> list[tuple[str, Peer]]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        for worker in self.workers:
            worker.transport.close()
