"""What a transport must do: write KV blocks into a peer's cache and tell the peer about it.

A transport owns one agent and is driven from any thread. All its work happens on its own poller, which
sleeps when nothing is under way. Futures complete on that poller's thread; asyncio callers wrap them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import LeadoutError
from cluster.load import LinkReport, TransferCounters
from cluster.members import Peer, TransportEndpoint, WorkerRecord


class TransferError(LeadoutError):
    """A write or notification did not reach its peer. The peer's blocks may hold partial data."""


class WriteAbandonedError(TransferError):
    """A write has run out of time, but it cannot be recalled and may still land.

    When ``over`` completes it cannot any more, be it that it has landed or that its peer has died. Until then
    nobody may tell the peer that its blocks are safe, and ``add_peer`` refuses the same incarnation.
    """

    def __init__(self, message: str, over: Future[None]) -> None:
        super().__init__(message)
        self.over = over


class TransportUnavailableError(LeadoutError):
    """The transport cannot run here; the message says what is missing and what to install."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one write took."""

    num_bytes: int
    num_descriptors: int  # after merging runs that are contiguous on both sides
    duration_ms: float  # from post to completion on the peer


NotificationHandler = Callable[[bytes], None]


class Transport(Protocol):
    """Moves KV blocks. Every method may be called from any thread."""

    @property
    def endpoint(self) -> TransportEndpoint:
        """What peers need in order to write here. Goes into the worker's registration."""
        ...

    def on_notification(self, handler: NotificationHandler) -> None:
        """Set the handler of incoming notifications. It runs on the poller's thread and must not block."""
        ...

    def add_peer(self, record: WorkerRecord) -> Future[None]:
        """Load a peer's metadata, connect, and warm the path up. Idempotent per incarnation.

        An older incarnation of the same worker is removed first. The future fails with ``TransferError``.
        """
        ...

    def remove_peer(self, peer: Peer) -> Future[None]:
        """Accept no more writes to ``peer``, end those in flight and forget its agent. Unknown ones are fine.

        Writes in flight are cancelled where the network can do that, else they land, fail or run out of time.
        When the future completes and the peer is dead, nothing that it had sent can land here any more.
        """
        ...

    def write_blocks(
        self, peer: Peer, local_block_ids: Sequence[int], remote_block_ids: Sequence[int]
    ) -> Future[TransferStats]:
        """Copy local blocks into the peer's blocks, pairwise.

        Raises ``ValueError`` for unequal lengths, ids out of range, or a remote block named twice.

        When the future completes, the bytes have landed. It fails with ``TransferError``, and with
        ``WriteAbandonedError`` where the bytes may still land.
        """
        ...

    def notify(self, peer: Peer, payload: bytes) -> Future[None]:
        """Deliver ``payload`` to the peer's notification handler. Not ordered against unfinished writes."""
        ...

    def expect_traffic(self, key: str) -> None:
        """Keep the poller awake until ``stop_expecting(key)``: a peer will write or notify."""
        ...

    def stop_expecting(self, key: str) -> None:
        """The counterpart of ``expect_traffic``; unknown keys are ignored."""
        ...

    def links(self) -> tuple[LinkReport, ...]:
        """The paths to the current peers, in the order they were added."""
        ...

    def counters(self) -> TransferCounters:
        """What this transport has done so far."""
        ...

    def close(self) -> None:
        """Stop the poller and release the agent. Outstanding futures fail with ``TransferError``."""
        ...
