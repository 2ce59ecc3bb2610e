"""What is under way in a world: messages, writes, and commands to engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.clock import Clock
from cluster.malformed import MalformedMessage
from cluster.members import Peer, WorkerRecord
from cluster.messages import Envelope, Message, RequestTimings
from engine.engine import Engine
from kv_transfer.handoff import Handoff
from kv_transfer.transport import TransferStats
from kv_transfer.verification import BlockVerifier

if TYPE_CHECKING:
    from tests.simulation.world import Worker


class InlineVerifier(BlockVerifier):
    """Computes checksums at once, in the caller's thread: what happens when is the world's business."""

    def checksums(self, block_ids: Sequence[int]) -> Future[list[int]]:
        future: Future[list[int]] = Future()
        future.set_result([self._checksum(block_id) for block_id in block_ids])
        return future


class RecordedEvents:
    """See WorkerEvents."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.handoffs: list[Handoff] = []  # that have ended
        self.corrupted: list[float] = []  # when blocks came that were not what was sent

    def first_token(self, timings: RequestTimings) -> None: ...

    def failed(self, code: str) -> None: ...

    def handoff_ended(self, handoff: Handoff) -> None:
        self.handoffs.append(handoff)

    def lease_expired(self) -> None: ...

    def router_lost(self) -> None: ...

    def corrupt(self) -> None:
        self.corrupted.append(self._clock.unix())

    def dropped(self, reason: str) -> None: ...


@dataclass(eq=False)
class Write:
    """A one-sided write under way: its bytes are read and written when it lands."""

    source: Worker
    target: Peer
    local_ids: tuple[int, ...]
    remote_ids: tuple[int, ...]
    future: Future[TransferStats]


@dataclass(eq=False)
class Packet:
    """A message under way between two lives of processes."""

    sender: Peer
    receiver: str  # id: whoever lives there when it arrives
    message: Message
    is_notification: bool = False


class SimulatedConnection:
    """See ``cluster.rpc.Connection``: to one life of a worker, in the table of its owner while it is open."""

    def __init__(
        self,
        packets: Callable[[], list[Packet]],
        owner: Peer,
        table: dict[Peer, SimulatedConnection],
        record: WorkerRecord,
        on_message: Callable[[Envelope], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        self._packets = packets
        self._owner = owner
        self._table = table
        self._worker = Peer(record.id, record.incarnation)
        self.on_message = on_message
        self.on_disconnected = on_disconnected
        table[self._worker] = self

    def send(self, message: Message) -> None:
        self._packets().append(Packet(self._owner, self._worker.worker_id, message))

    def receive(self, packet: Packet) -> None:
        self.on_message(Envelope(packet.sender.worker_id, packet.sender.incarnation, packet.message))

    def close(self) -> None:
        self._table.pop(self._worker, None)


class SimulatedServer:
    """See ``cluster.network.Server``: answers go to whoever spoke to it, if its newest life did."""

    num_malformed = num_undeliverable = 0

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._incarnations: dict[str, int] = {}  # newest one seen of each sender
        self.on_message: Callable[[str, int, Message], None]
        self.on_malformed: Callable[[str, int, MalformedMessage], None]
        self.num_stale = 0

    async def bind(self, address: str) -> str:
        return address

    def receive(self, packet: Packet) -> None:
        sender, incarnation = packet.sender.worker_id, packet.sender.incarnation
        if incarnation < self._incarnations.get(sender, 0):
            self.num_stale += 1
            return
        self._incarnations[sender] = incarnation
        self.on_message(sender, incarnation, packet.message)

    def receive_malformed(self, message: MalformedMessage) -> None:
        self._incarnations[message.sender] = message.incarnation
        self.on_malformed(message.sender, message.incarnation, message)

    def send(self, peer: str, message: Message) -> bool:
        if self._worker.is_cut_off or peer not in self._incarnations:
            return False
        self._worker.world.packets.append(Packet(self._worker.peer, peer, message))
        return True

    def forget(self, peer: str) -> None:
        self._incarnations.pop(peer, None)

    async def close(self) -> None: ...


class SimulatedLoop:
    """Stands for the engine's thread: commands and steps run when the world says so."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.commands: list[tuple[Callable[[Engine], Any], Future[Any]]] = []

    def submit(self, command: Callable[[Engine], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.commands.append((command, future))
        return future

    def run_commands(self) -> None:
        commands, self.commands = self.commands, []
        for command, future in commands:
            try:
                future.set_result(command(self.engine))
            except Exception as error:
                future.set_exception(error)
