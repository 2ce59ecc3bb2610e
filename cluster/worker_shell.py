"""The process shell of a worker: its messages, and what it publishes to routers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.load import LoadReport
from cluster.malformed import MalformedMessage
from cluster.members import Members, Role
from cluster.messages import Drain, KvEvents, LoadUpdate, Message, SetRole, Subscribe
from cluster.network import Network
from cluster.problem_log import ProblemLog

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Subscriber:
    incarnation: int
    renewed_at: float  # monotonic seconds


class WorkerShell:
    """Connects one worker to routers and other workers. Not thread-safe.

    Routers subscribe over RPC and are then told of every change of the prefix cache and, each interval, of
    the load. A router that is neither registered nor has renewed its subscription within the lease is lost.
    """

    def __init__(
        self,
        network: Network,
        clock: Clock,
        *,
        lease_s: float,
        on_message: Callable[[str, int, Message], None],
        on_router_lost: Callable[[str, int], None],
        on_drain: Callable[[], None],
        on_set_role: Callable[[Role], None],
        on_malformed: Callable[[str, int, MalformedMessage], None] = lambda peer, incarnation, message: None,
    ) -> None:
        """``on_message(peer, incarnation, message)`` gets what the shell does not handle itself,
        ``on_malformed`` a request's message that could not be read.

        ``on_drain``: an operator wants this process to finish and end; ``on_set_role``: to change its role.
        """
        self._lease_s = lease_s
        self._clock = clock
        self._problems = ProblemLog(logger, clock)
        self._on_message = on_message
        self._on_router_lost = on_router_lost
        self._on_drain = on_drain
        self._on_set_role = on_set_role
        self._server = network.listen(self._receive, on_malformed)
        self._subscribers: dict[str, _Subscriber] = {}
        self._registered_routers: frozenset[tuple[str, int]] = frozenset()
        self._worker_ids: frozenset[str] = frozenset()  # registered
        self._cached_blocks: dict[bytes, None] = {}  # in the order stored
        self._event_sequence = 0
        self._load: LoadReport | None = None  # the last one published

    @property
    def dropped_messages(self) -> dict[str, int]:
        """Messages dropped since the start: of an older incarnation, malformed, or not deliverable."""
        return {
            "old_incarnation": self._server.num_stale,
            "malformed": self._server.num_malformed,
            "undeliverable": self._server.num_undeliverable,
        }

    async def bind(self, address: str) -> str:
        """Open the RPC endpoint; returns its real address. Raises RpcError."""
        return await self._server.bind(address)

    async def close(self) -> None:
        """Close the RPC endpoint."""
        await self._server.close()

    def send(self, peer: str, message: Message) -> bool:
        """Answer a peer; False if it is gone or does not keep up."""
        return self._server.send(peer, message)

    def publish_kv_events(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell subscribed routers how the prefix cache changed."""
        if not stored and not removed:
            return
        for block_hash in removed:
            self._cached_blocks.pop(block_hash, None)
        self._cached_blocks.update(dict.fromkeys(stored))
        self._event_sequence += 1
        event = KvEvents(sequence=self._event_sequence, stored=list(stored), removed=list(removed))
        for router in self._subscribers:
            self._server.send(router, event)

    def publish_load(self, load: LoadReport) -> None:
        """Tell subscribed routers the load."""
        self._load = load
        for router in self._subscribers:
            self._server.send(router, LoadUpdate(load=load))

    def drop_lost_routers(self) -> None:
        """Forget routers whose lease has ended, and their requests with them."""
        oldest = self._clock.monotonic() - self._lease_s
        for router, subscriber in list(self._subscribers.items()):
            is_registered = (router, subscriber.incarnation) in self._registered_routers
            if subscriber.renewed_at < oldest and not is_registered:
                self._problems.report(("lost", router, subscriber.incarnation), "router %s is lost", router)
                del self._subscribers[router]
                self._on_router_lost(router, subscriber.incarnation)
                self._server.forget(router)

    def take_over(self, members: Members) -> None:
        """Take note of who is registered."""
        self._registered_routers = frozenset((one.id, one.incarnation) for one in members.routers)
        worker_ids = frozenset(one.id for one in members.workers)
        for gone in self._worker_ids - worker_ids:
            self._server.forget(gone)
        self._worker_ids = worker_ids

    def _receive(self, peer: str, incarnation: int, message: Message) -> None:
        if isinstance(message, Subscribe):
            self._subscribe(peer, incarnation, message.snapshot)
        elif isinstance(message, Drain):
            logger.info("%s asks this worker to drain", peer)
            self._on_drain()
        elif isinstance(message, SetRole):
            logger.info("%s asks this worker to take the role %s", peer, message.role)
            self._on_set_role(message.role)
        else:
            self._on_message(peer, incarnation, message)

    def _subscribe(self, router: str, incarnation: int, wants_snapshot: bool) -> None:
        now = self._clock.monotonic()
        known = self._subscribers.get(router)
        if known is not None and known.incarnation == incarnation:
            known.renewed_at = now
        else:
            if known is not None:
                self._on_router_lost(router, known.incarnation)
            self._subscribers[router] = _Subscriber(incarnation, now)
            wants_snapshot = True
        if wants_snapshot:
            self._send_snapshot(router)
            if self._load is not None:  # it can plan at once
                self._server.send(router, LoadUpdate(load=self._load))

    def _send_snapshot(self, router: str) -> None:
        self._server.send(
            router, KvEvents(sequence=self._event_sequence, stored=list(self._cached_blocks), snapshot=True)
        )
