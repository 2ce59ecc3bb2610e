"""What a worker process asks of a role."""

from __future__ import annotations

from typing import Protocol

from cluster.malformed import MalformedMessage
from cluster.members import Peer, WorkerRecord
from cluster.messages import Message
from engine.step_result import StepResult
from kv_transfer.handoff_ledger import HandoffLedger


class WorkerRole(Protocol):
    """``PrefillWorker`` and ``DecodeWorker`` are the two. Every method runs in the worker's event loop."""

    @property
    def ledger(self) -> HandoffLedger:
        """The role's live handoffs."""
        ...

    @property
    def num_active(self) -> int:
        """Requests in hand, handoffs included."""
        ...

    def drain(self) -> None:
        """Refuse new work from now on; what is in hand goes on."""
        ...

    def resume(self) -> None:
        """Take new work again."""
        ...

    def abandon(self, reason: str) -> None:
        """End what is in hand, so that others can take it over."""
        ...

    def on_message(self, sender: str, incarnation: int, message: Message) -> None:
        """A message from a router or another worker."""
        ...

    def on_malformed(self, sender: str, incarnation: int, message: MalformedMessage) -> None:
        """A message of one request that could not be read."""
        ...

    def on_notification(self, payload: bytes) -> None:
        """A notification of the transport."""
        ...

    def on_step(self, result: StepResult) -> None:
        """What one engine step did."""
        ...

    def on_tick(self) -> None:
        """Once per report interval."""
        ...

    def on_peer_connected(self, peer: Peer, record: WorkerRecord) -> None:
        """Blocks can be handed over to or by this worker now. May come again."""
        ...

    def on_peer_lost(self, peer: Peer) -> None:
        """A worker is gone and its agent is removed here: it can neither write nor be written to any more."""
        ...

    def on_router_lost(self, router: str, incarnation: int) -> None:
        """A router is gone and takes no more answers."""
        ...

    def close(self) -> None:
        """Drop all connections."""
        ...
