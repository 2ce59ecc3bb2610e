"""What the NIXL driver keeps: connections to peers, posted writes, and removals that are under way."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cluster.load import LinkReport
from cluster.members import Peer, TransportEndpoint
from kv_transfer.layout_planner import CacheShape
from kv_transfer.transport import TransferStats

WritePurpose = Literal["blocks", "warm_up", "probe"]


@dataclass(eq=False, slots=True)
class Connection:
    """One peer whose metadata is loaded. ``link`` is replaced, never changed: other threads read it."""

    peer: Peer
    endpoint: TransportEndpoint
    cache: CacheShape
    link: LinkReport
    started_at: float
    connect_ms: float = 0.0  # load its metadata, connect, first write; 0 until that has landed
    waiters: list[Future[None]] = field(default_factory=list)  # of add_peer, until the path is warm
    leavers: list[Future[None]] = field(default_factory=list)  # of remove_peer, while writes are in flight
    over: Future[None] = field(default_factory=Future)  # completes when no write to it can land any more
    writes: set[Write] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Write:
    """One posted write."""

    purpose: WritePurpose
    connection: Connection
    handle: Any
    num_bytes: int
    num_descriptors: int
    posted_at: float
    future: Future[TransferStats] | None  # None for warm-up and probe
    is_abandoned: bool = False  # it has run out of time, and ``future`` has failed


class Drain(NamedTuple):
    """A removal that waits until the bytes that its peer had sent have landed."""

    future: Future[None]
    ends_at: float
    ends_at_poll: int
