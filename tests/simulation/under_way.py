"""What is under way in a world: messages, writes, and commands to engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.messages import Message
from engine.engine import Engine
from kv_transfer.transport import Peer, TransferStats
from kv_transfer.verification import BlockVerifier

if TYPE_CHECKING:
    from tests.simulation.world import Worker


class InlineVerifier(BlockVerifier):
    """Computes checksums at once, in the caller's thread: what happens when is the world's business."""

    def checksums(self, block_ids: Sequence[int]) -> Future[list[int]]:
        future: Future[list[int]] = Future()
        future.set_result([self._checksum(block_id) for block_id in block_ids])
        return future


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
