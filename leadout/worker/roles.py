"""Builds the role that a worker process plays, on an engine and a transport that exist already."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cluster.clock import Clock
from cluster.config.settings import LeadoutConfig
from cluster.malformed import MalformedMessage
from cluster.members import WorkerRecord
from cluster.messages import Message, Sealed
from cluster.metrics import WorkerMetrics
from cluster.problem_log import ProblemLog
from decode_worker.decode_worker import DecodeMetrics, DecodeWorker
from decode_worker.prefill_links import PrefillLinks
from engine.engine_commands import EngineCommands
from engine.step_result import StepResult
from kv_transfer.handoff import Handoff
from kv_transfer.handoff_ledger import HandoffLedger
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import Peer, Transport
from kv_transfer.verification import BlockVerifier
from prefill_worker.prefill_worker import PrefillWorker

logger = logging.getLogger(__name__)


class WorkerRole(Protocol):
    """What a host needs of a role; ``PrefillWorker`` and ``DecodeWorker`` are the two."""

    @property
    def num_active(self) -> int:
        """Requests in hand, handoffs included."""
        ...

    def drain(self) -> None:
        """Refuse new work."""
        ...

    def abandon(self, reason: str) -> None:
        """End what is in hand, so that others can take it over."""
        ...

    def on_message(self, peer: str, incarnation: int, message: Message) -> None:
        """A message from a router or decode worker."""
        ...

    def on_malformed(self, peer: str, incarnation: int, message: MalformedMessage) -> None:
        """A message of one request that could not be read."""
        ...

    def on_router_lost(self, router: str, incarnation: int) -> None:
        """A router is gone and takes no more answers."""
        ...

    def on_step(self, result: StepResult) -> None:
        """What one engine step did."""
        ...

    def on_tick(self) -> None:
        """Once per report interval."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSurroundings:
    """What a role works with. ``send`` answers a peer; ``post`` runs a function in the event loop."""

    config: LeadoutConfig
    own: Peer
    record: WorkerRecord
    engine: EngineCommands
    transport: Transport
    verifier: BlockVerifier
    clock: Clock
    metrics: WorkerMetrics
    connections: Callable[[], PeerConnections]  # they are built after the role
    send: Callable[[str, Message], bool]
    post: Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRole:
    """A role, and what the host must tell it of its peers."""

    role: WorkerRole
    ledger: HandoffLedger
    on_connected: Callable[[Peer, WorkerRecord], None]
    on_lost: Callable[[Peer], None]
    close: Callable[[], None]


def build_role(around: RoleSurroundings) -> HostedRole:
    """The role that the record names."""
    return _prefill_role(around) if around.record.role == "prefill" else _decode_role(around)


def _prefill_role(around: RoleSurroundings) -> HostedRole:
    registry = around.config.registry
    role = PrefillWorker(
        own=around.own,
        block_size=around.record.kv_layout.block_size,
        engine=around.engine,
        transport=around.transport,
        verifier=around.verifier,
        get_peer=lambda worker_id: around.connections().get(worker_id),
        mark_peer_failed=lambda peer: around.connections().mark_failed(peer),
        clock=around.clock,
        heartbeat_s=registry.heartbeat_ms / 1000,
        max_stall_s=registry.max_stall_s,
        send=around.send,
        post=around.post,
        on_sealed=around.metrics.observe_timings,
        on_failed=around.metrics.request_failed,
        on_handoff_ended=functools.partial(_count_handoff, around.metrics),
        on_dropped=around.metrics.message_dropped,
    )
    return HostedRole(
        role=role,
        ledger=role.ledger,
        on_connected=role.on_peer_connected,
        on_lost=role.on_peer_lost,
        close=lambda: None,
    )


def _decode_role(around: RoleSurroundings) -> HostedRole:
    metrics = around.metrics
    problems = ProblemLog(logger, around.clock)
    links = PrefillLinks(
        around.own,
        on_message=lambda peer, message: role.on_prefill_worker_message(peer, message),
        on_unreachable=lambda peer: role.remote_prefills.on_unreachable(peer),
    )
    role = DecodeWorker(
        own=around.own,
        block_size=around.record.kv_layout.block_size,
        lease_s=around.config.registry.lease_ms / 1000,
        engine=around.engine,
        transport=around.transport,
        verifier=around.verifier,
        links=links,
        clock=around.clock,
        send=around.send,
        post=around.post,
        metrics=DecodeMetrics(
            on_first_token=metrics.observe_timings,
            on_failed=metrics.request_failed,
            on_handoff_ended=functools.partial(_count_handoff, metrics),
            on_lease_expired=lambda: metrics.lease_expired("prefill"),
            on_corrupt=metrics.checksum_mismatch,
            on_dropped=metrics.message_dropped,
        ),
    )

    def on_notification(payload: bytes) -> None:
        try:
            sealed = msgspec.msgpack.decode(payload, type=Sealed)
        except msgspec.DecodeError as error:
            metrics.message_dropped("malformed")
            problems.report("malformed", "dropped a malformed notification: %s", error)
            return
        role.remote_prefills.on_sealed(sealed)

    def on_lost(peer: Peer) -> None:
        links.close(peer)
        role.remote_prefills.on_peer_lost(peer)

    around.transport.on_notification(lambda payload: around.post(lambda: on_notification(payload)))
    return HostedRole(
        role=role,
        ledger=role.remote_prefills.ledger,
        on_connected=links.open,
        on_lost=on_lost,
        close=links.close_all,
    )


def _count_handoff(metrics: WorkerMetrics, handoff: Handoff) -> None:
    assert handoff.outcome is not None
    fence_s = handoff.changed_at - handoff.fenced_at if handoff.fenced_at else None
    metrics.handoff_ended(handoff.outcome.value, fence_s)
