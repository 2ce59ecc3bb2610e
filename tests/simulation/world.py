"""A router, a prefill worker and a decode worker in one thread, on a network that misbehaves on command.

The roles, engines and ledgers are the real ones; engines run the tiny prefix model, whose tokens depend on
every position of the KV cache. Nothing happens by itself: each delivery, landing of a write, engine step and
crash is a call, so that a random walk over the calls is a random interleaving of the processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import torch

from cluster.clock import ManualClock
from cluster.config.settings import RegistryConfig
from cluster.kv_layout import KvLayout
from cluster.load import LinkReport, TransferCounters
from cluster.malformed import MalformedMessage
from cluster.members import Members, ModelIdentity, Peer, Role, TransportEndpoint, WorkerRecord
from cluster.messages import (
    Cancel,
    CancelPrefill,
    Envelope,
    Generate,
    HandoffFenced,
    HandoffProgress,
    Message,
    Prefill,
    Sealed,
    TokenBatch,
    TokenOutput,
)
from cluster.sequence_spec import RequestKey
from decode_worker.decode_worker import DecodeWorker
from engine.engine import Engine
from engine.engine_commands import EngineCommands
from kv_transfer.transport import TransferError, TransferStats
from kv_transfer.verification import VerifyMode
from leadout.worker.hosted_worker import HostedWorker
from prefill_worker.prefill_worker import PrefillWorker
from tests.engine.prefix_runner import VOCAB_SIZE, make_engine
from tests.simulation.under_way import (
    InlineVerifier,
    Packet,
    RecordedEvents,
    SimulatedConnection,
    SimulatedLoop,
    SimulatedServer,
    Write,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 15
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")


VERIFY: VerifyMode = "all"
REGISTRY = RegistryConfig(lease_ms=5000, heartbeat_ms=1000)
LEASE_S = REGISTRY.lease_ms / 1000
MAX_STALL_S = REGISTRY.max_stall_s


@dataclass(eq=False)
class Worker:
    """One life of one worker process."""

    world: World
    peer: Peer
    role_name: Role
    posts: list[Callable[[], None]] = field(default_factory=list)
    agents: set[Peer] = field(default_factory=set)  # whom this one's transport knows
    connections: dict[Peer, SimulatedConnection] = field(default_factory=dict)  # to other workers
    is_alive: bool = True
    is_cut_off: bool = False  # its answers reach nobody

    def __post_init__(self) -> None:
        engine, self.runner = make_engine(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=8, max_num_seqs=6
        )
        self.loop = SimulatedLoop(engine)
        commands = EngineCommands(self.loop, self.posts.append)  # type: ignore[arg-type]
        kv = self.runner.kv
        verifier = InlineVerifier(
            VERIFY,
            base_address=kv.data_ptr(),
            block_bytes=kv[0].numel() * kv.element_size(),
            num_blocks=NUM_BLOCKS,
        )
        self.server = SimulatedServer(self)
        self.events = RecordedEvents(self.world.clock)
        self.hosted = HostedWorker(
            self._record(),
            registry=REGISTRY,
            clock=self.world.clock,
            network=self,
            engine=commands,
            transport=self,  # type: ignore[arg-type]
            verifier=verifier,
            events=self.events,
            post=self.posts.append,
            check_gone=self.world.check_gone,
            on_changed=self.world.role_changed,
            on_drain=lambda: None,
        )

    @property
    def role(self) -> PrefillWorker | DecodeWorker:
        """The role that it was started with."""
        return self.hosted.prefill if self.role_name == "prefill" else self.hosted.decode

    @property
    def record(self) -> WorkerRecord:
        return self.hosted.record

    @property
    def engine(self) -> Engine:
        return self.loop.engine

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.peer.worker_id,
            incarnation=self.peer.incarnation,
            role=self.role_name,
            pid=1,
            host="h",
            address=f"tcp://127.0.0.1:{5000 + self.peer.incarnation}",
            metrics_address="",
            model=ModelIdentity(
                name="m",
                source="m",
                fingerprint="f",
                dtype="float32",
                max_model_len=64,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(),
            ),
            kv_layout=LAYOUT,
            endpoints=(
                TransportEndpoint(
                    kind="nixl", agent_name="a", metadata=b"", base_address=1, num_blocks=NUM_BLOCKS
                ),
            ),
        )

    # --- messages ---

    def listen(
        self,
        on_message: Callable[[str, int, Message], None],
        on_malformed: Callable[[str, int, MalformedMessage], None],
    ) -> SimulatedServer:
        self.server.on_message, self.server.on_malformed = on_message, on_malformed
        return self.server

    def connect(
        self,
        worker: WorkerRecord,
        on_message: Callable[[Envelope], None],
        on_disconnected: Callable[[], None],
    ) -> SimulatedConnection:
        return SimulatedConnection(
            lambda: self.world.packets, self.peer, self.connections, worker, on_message, on_disconnected
        )

    def receive(self, packet: Packet) -> None:
        if packet.is_notification:
            if packet.sender in self.agents:
                self.hosted.on_notification(msgspec.msgpack.encode(packet.message))
        elif isinstance(packet.message, HandoffFenced | HandoffProgress):
            if packet.sender in self.connections:
                self.connections[packet.sender].receive(packet)
        else:
            self.server.receive(packet)

    # --- the transport ---

    def add_peer(self, record: WorkerRecord) -> Future[None]:
        future: Future[None] = Future()
        self.agents.add(Peer(record.id, record.incarnation))
        future.set_result(None)
        return future

    def remove_peer(self, peer: Peer) -> Future[None]:
        """Both directions: afterwards neither side of the pair can write into the other."""
        self.agents.discard(peer)
        for write in list(self.world.writes):
            if {write.source.peer, write.target} == {self.peer, peer}:
                self.world.fail(write)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def write_blocks(self, peer: Peer, local: Sequence[int], remote: Sequence[int]) -> Future[TransferStats]:
        future: Future[TransferStats] = Future()
        write = Write(self, peer, tuple(local), tuple(remote), future)
        target = self.world.at(peer)
        if peer not in self.agents or target is None or self.peer not in target.agents:
            future.set_exception(TransferError("no such peer"))
        else:
            self.world.writes.append(write)
        return future

    def notify(self, peer: Peer, payload: bytes) -> Future[None]:
        sealed = msgspec.msgpack.decode(payload, type=Sealed)
        self.world.packets.append(Packet(self.peer, peer.worker_id, sealed, is_notification=True))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def links(self) -> tuple[LinkReport, ...]:
        return ()

    def counters(self) -> TransferCounters:
        return TransferCounters()

    def expect_traffic(self, key: str) -> None: ...

    def stop_expecting(self, key: str) -> None: ...

    # --- what the world makes it do ---

    def check_invariants(self) -> None:
        self.engine.check_invariants()
        self.hosted.prefill.ledger.check_invariants()
        self.hosted.decode.ledger.check_invariants()

    def run_posts(self) -> None:
        while self.posts:
            self.posts.pop(0)()

    def step(self) -> None:
        self.loop.run_commands()
        if self.engine.has_work():
            result = self.engine.step(self.world.clock.monotonic())
            self.posts.append(functools.partial(self.hosted.on_step, result))


@dataclass(eq=False)
class Answer:
    """What the router knows of one request."""

    generate: Generate
    tokens: list[int] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)  # finish reasons and error codes
    is_cancelled: bool = False


class World:
    """The processes, what is under way between them, and what must hold at every moment."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.packets: list[Packet] = []
        self.writes: list[Write] = []
        self.answers: dict[str, Answer] = {}
        self.workers: dict[str, Worker] = {}
        self._lives = 0
        self.start("prefill-0", "prefill")
        self.start("decode-0", "decode")

    @classmethod
    def connected(cls) -> World:
        """A world whose two workers know each other."""
        world = cls()
        world.update_members()
        for worker in world.workers.values():
            worker.run_posts()
        return world

    def start(self, name: str, role: Role) -> None:
        self._lives += 1
        self.workers[name] = Worker(self, Peer(name, self._lives), role)

    def at(self, peer: Peer) -> Worker | None:
        worker = self.workers.get(peer.worker_id)
        return worker if worker is not None and worker.is_alive and worker.peer == peer else None

    def check_gone(self, record: WorkerRecord) -> Future[bool]:
        """What the operating system knows of a process."""
        worker = self.workers.get(record.id)
        future: Future[bool] = Future()
        future.set_result(
            worker is None or worker.peer.incarnation != record.incarnation or not worker.is_alive
        )
        return future

    def role_changed(self, record: WorkerRecord) -> None:
        """Nothing to do: the world looks at all records."""

    def crash(self, name: str) -> None:
        """kill -9: its memory is gone, and so are the writes it was making and those into it."""
        worker = self.workers[name]
        worker.is_alive = False
        for write in list(self.writes):
            if write.source is worker:
                self.writes.remove(write)
            elif write.target == worker.peer:
                self.fail(write)
        if worker.role_name == "decode":
            for answer in self.answers.values():  # the router's lease view: its streams end
                if not answer.endings:
                    answer.endings.append("worker lost")

    def update_members(self) -> None:
        records = [worker.record for worker in self.workers.values() if worker.is_alive]
        for worker in self.workers.values():
            if worker.is_alive:
                worker.hosted.on_members(Members(workers=tuple(records)))

    def send_generate(self, generate: Generate) -> None:
        self.answers[generate.key.request_id] = Answer(generate)
        self.packets.append(Packet(Peer("router-0", 1), "decode-0", generate))

    def cancel(self, request_id: str) -> None:
        answer = self.answers[request_id]
        answer.is_cancelled = True
        cancel = Cancel(key=RequestKey(request_id, answer.generate.key.attempt))
        self.packets.append(Packet(Peer("router-0", 1), "decode-0", cancel))

    def deliver(self, packet: Packet, *, keep: bool = False) -> None:
        """Hand a packet over; with ``keep`` it will arrive once more."""
        if not keep:
            self.packets.remove(packet)
        if packet.receiver == "router-0":
            assert isinstance(packet.message, TokenBatch)
            for output in packet.message.outputs:
                self._take(output)
            return
        worker = self.workers[packet.receiver]
        if worker.is_alive:
            worker.receive(packet)
        elif isinstance(packet.message, Generate):  # the router notices by the lease
            answer = self.answers[packet.message.key.request_id]
            if not answer.endings:
                answer.endings.append("worker lost")

    def land(self, write: Write) -> None:
        """A write completes: its bytes go from one cache into the other now."""
        self.writes.remove(write)
        target = self.at(write.target)
        assert target is not None
        target.runner.kv[torch.tensor(write.remote_ids)] = write.source.runner.kv[
            torch.tensor(write.local_ids)
        ]
        stats = TransferStats(num_bytes=len(write.local_ids), num_descriptors=1, duration_ms=0.1)
        write.future.set_result(stats)

    def fail(self, write: Write) -> None:
        self.writes.remove(write)
        write.future.set_exception(TransferError("cut"))

    def check(self) -> None:
        """No block is both free and writable by a peer, or both free and being read by a transfer."""
        for worker in self.workers.values():
            if worker.is_alive:
                worker.check_invariants()
        for write in self.writes:
            target = self.at(write.target)
            assert target is not None
            self._check_held(target, write.remote_ids, "written")
            self._check_held(write.source, write.local_ids, "read")
        for worker in self.workers.values():
            if not worker.is_alive:
                continue
            for request in worker.hosted.prefill._requests.values():
                decode = self.at(request.peer)
                is_fencing = worker.hosted.prefill._is_fencing(request)
                if decode is not None and worker.peer in decode.agents and not is_fencing:
                    pushed = request.next_block - request.message.first_block
                    if request.output is None or request.operations_in_flight:
                        self._check_held(decode, request.message.block_ids[pushed:], "writable")

    def _check_held(self, worker: Worker, block_ids: Sequence[int], what: str) -> None:
        pool = worker.engine._kv_cache._pool
        free = [block_id for block_id in block_ids if pool.ref_count(block_id) == 0]
        assert not free, f"blocks {free} of {worker.peer.worker_id} are free, but still {what}"

    def _take(self, output: TokenOutput) -> None:
        answer = self.answers[output.key.request_id]
        if answer.is_cancelled or answer.endings:
            return
        answer.tokens += output.token_ids
        if output.error is not None:
            answer.endings.append(output.error.code)
        elif output.finish_reason is not None:
            answer.endings.append(output.finish_reason)


REPAIRABLE = (Prefill, CancelPrefill, HandoffFenced, HandoffProgress)  # whose loss the protocol makes good
