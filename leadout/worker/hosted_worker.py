"""One worker without its process: both roles on one engine and one transport."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from msgspec import structs

from cluster.clock import Clock
from cluster.config.settings import RegistryConfig
from cluster.load import Load, LoadReport, WorkerState
from cluster.malformed import MalformedMessage
from cluster.members import Members, Peer, Role, WorkerRecord, takes_prefills, takes_requests
from cluster.messages import CancelPrefill, Message, Prefill
from cluster.network import Network
from cluster.worker_shell import WorkerShell
from decode_worker.decode_worker import DecodeWorker
from engine.engine_commands import EngineCommands
from engine.step_result import StepResult
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import Transport
from kv_transfer.verification import BlockVerifier
from leadout.worker.load_report import load_report
from prefill_worker.prefill_worker import PrefillWorker
from worker_runtime.events import WorkerEvents
from worker_runtime.role import WorkerRole
from worker_runtime.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

_PREFILL_KINDS = ("prefill", "cancel_prefill")  # tags of messages to the prefill role


class HostedWorker:
    """Gives each role what is its own of messages, steps, notifications and ticks. Lives in one event loop.

    Both roles are always there; the record says which of them take new work. A role that is not advertised
    refuses it, on which routers and decode workers turn to others, and finishes what it has: a flip costs no
    request and loads nothing.
    """

    def __init__(
        self,
        record: WorkerRecord,
        *,
        registry: RegistryConfig,
        clock: Clock,
        network: Network,
        engine: EngineCommands,
        transport: Transport,
        verifier: BlockVerifier,
        events: WorkerEvents,
        post: Callable[[Callable[[], None]], None],
        check_gone: Callable[[WorkerRecord], Future[bool]],
        on_changed: Callable[[WorkerRecord], None],
        on_drain: Callable[[], None],
        on_activity: Callable[[], None] = lambda: None,
    ) -> None:
        """``registry`` says when silence means death. ``post`` runs a function in the loop, from any thread.

        ``check_gone``: see PeerConnections. ``on_changed``: the record has changed, and others must see it.
        ``on_drain``: an operator wants this worker to finish and end. ``on_activity``: something has come.
        """
        self.record = record
        self._events = events
        self._transport = transport
        self._on_changed = on_changed
        self._on_activity = on_activity
        self._is_draining = False
        self._has_members = False
        lease_s = registry.lease_ms / 1000
        self.shell = WorkerShell(
            network,
            clock,
            lease_s=lease_s,
            on_message=self._on_message,
            on_malformed=self._on_malformed,
            on_router_lost=self._on_router_lost,
            on_drain=on_drain,
            on_set_role=self.set_role,
        )
        self._connections = PeerConnections(
            transport,
            record,
            post=post,
            check_gone=check_gone,
            on_connected=self._on_peer_connected,
            on_lost=self._on_peer_lost,
        )
        runtime = WorkerRuntime(
            own=Peer(record.id, record.incarnation),
            block_size=record.kv_layout.block_size,
            lease_s=lease_s,
            heartbeat_s=registry.heartbeat_ms / 1000,
            max_stall_s=registry.max_stall_s,
            clock=clock,
            engine=engine,
            transport=transport,
            verifier=verifier,
            peers=self._connections,
            network=network,
            send=self.shell.send,
            post=post,
        )
        self.prefill = PrefillWorker(runtime, events)
        self.decode = DecodeWorker(runtime, events)
        self._admit()

    @property
    def num_active(self) -> int:
        """Requests in hand, handoffs not yet fenced included."""
        return sum(role.num_active for role in self._roles)

    @property
    def doubted(self) -> frozenset[Peer]:
        """Peers that are not registered any more, but not known to be gone."""
        return self._connections.doubted

    @property
    def is_connected(self) -> bool:
        """Whether it has seen the list of members, and no connection to one of them is being set up."""
        return self._has_members and self._connections.is_settled

    async def bind(self, address: str) -> None:
        """Take messages from now on; the real address is in the record. Raises RpcError."""
        self.record = structs.replace(self.record, address=await self.shell.bind(address))

    def set_role(self, role: Role) -> None:
        """Advertise another role, and let the one that is advertised no more finish. Not while draining."""
        if role == self.record.role:
            return
        if self._is_draining:
            logger.warning("this worker drains and does not become %s", role)
            return
        former = self.record.role
        self.record = structs.replace(self.record, role=role, role_epoch=self.record.role_epoch + 1)
        self._admit()
        self._on_changed(self.record)
        logger.info("was %s and is %s, with %d requests in hand", former, role, self.num_active)

    def drain(self) -> None:
        """Take no new work from now on; what is in hand goes on."""
        self._is_draining = True
        self._admit()

    def abandon(self, reason: str) -> None:
        """End what is in hand, so that others can take it over."""
        for role in self._roles:
            role.abandon(reason)

    def on_members(self, members: Members) -> None:
        """Who is registered now."""
        self.shell.take_over(members)
        self._connections.update(members.workers)
        self._has_members = True

    def on_step(self, result: StepResult) -> None:
        """What one engine step did. Each role knows its own requests by their engine ids."""
        self._on_activity()
        # First: a router that plans a failed request anew shall know what has landed here.
        self.shell.publish_kv_events(result.blocks_stored, result.blocks_removed)
        for role in self._roles:
            role.on_step(result)

    def on_notification(self, payload: bytes) -> None:
        """A notification of the transport."""
        self.decode.on_notification(payload)

    def on_tick(self) -> None:
        """What must happen in time, whatever the engine does. Once per report interval."""
        self.shell.drop_lost_routers()
        for role in self._roles:
            role.on_tick()

    def report(self, load: Load, state: WorkerState) -> LoadReport:
        """Publish the engine's load and what else is known of this worker; returns all of it."""
        report = load_report(
            load,
            state,
            [role.ledger for role in self._roles],
            self._transport.links(),
            self._transport.counters(),
            role_epoch=self.record.role_epoch,
            num_leaving=sum(role.num_active for role in self._roles if not self._takes_work(role)),
        )
        self.shell.publish_load(report)
        return report

    async def close(self) -> None:
        """Drop all connections."""
        for role in self._roles:
            role.close()
        await self.shell.close()

    @property
    def _roles(self) -> tuple[WorkerRole, WorkerRole]:
        return self.prefill, self.decode

    def _takes_work(self, role: WorkerRole) -> bool:
        advertised = self.record.role
        return takes_prefills(advertised) if role is self.prefill else takes_requests(advertised)

    def _admit(self) -> None:
        for role in self._roles:
            if self._takes_work(role) and not self._is_draining:
                role.resume()
            else:
                role.drain()

    def _on_message(self, sender: str, incarnation: int, message: Message) -> None:
        self._on_activity()
        role: WorkerRole = self.prefill if isinstance(message, Prefill | CancelPrefill) else self.decode
        role.on_message(sender, incarnation, message)

    def _on_malformed(self, sender: str, incarnation: int, message: MalformedMessage) -> None:
        self._on_activity()
        role: WorkerRole = self.prefill if message.kind in _PREFILL_KINDS else self.decode
        role.on_malformed(sender, incarnation, message)

    def _on_router_lost(self, router: str, incarnation: int) -> None:
        self._events.router_lost()
        for role in self._roles:
            role.on_router_lost(router, incarnation)

    def _on_peer_connected(self, peer: Peer, record: WorkerRecord) -> None:
        for role in self._roles:
            role.on_peer_connected(peer, record)

    def _on_peer_lost(self, peer: Peer) -> None:
        for role in self._roles:
            role.on_peer_lost(peer)
