"""Hosts one worker role on an engine: wires engine, transport, cluster and role together and runs them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from cluster.clock import Clock
from cluster.config import LeadoutConfig
from cluster.members import LoadReport, Members, ModelIdentity, Role, WorkerRecord, WorkerState
from cluster.messages import Message, Sealed
from cluster.metrics import WorkerMetrics
from cluster.model_source import ModelSource
from cluster.registry import Registry, RegistryUnavailableError
from cluster.worker_shell import WorkerShell
from decode_worker.decode_worker import DecodeWorker
from decode_worker.prefill_links import PrefillLinks
from engine.create_engine import CreatedEngine
from engine.engine_commands import EngineCommands
from engine.engine_loop import EngineLoop
from engine.step_result import EngineLoad, StepResult
from kv_transfer.create_transport import create_transport
from kv_transfer.handoff_ledger import HandoffLedger
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import Peer, Transport
from prefill_worker.prefill_worker import PrefillWorker

logger = logging.getLogger(__name__)

_REGISTRY_WAIT_S = 60.0  # a worker may start before the registry does
_DRAIN_POLL_S = 0.05
_IDLE_REPORT_S = 1.0  # interval of load reports while nothing happens: four times less work for everybody


class WorkerRole(Protocol):
    """What a host needs of a role; ``PrefillWorker`` and ``DecodeWorker`` are the two."""

    @property
    def num_active(self) -> int:
        """Requests in hand, handoffs included."""
        ...

    def drain(self) -> None:
        """Refuse new work."""
        ...

    def on_message(self, peer: str, incarnation: int, message: Message) -> None:
        """A message from a router or decode worker."""
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


class WorkerHost:
    """One worker process's parts and their lifetime."""

    def __init__(
        self,
        config: LeadoutConfig,
        *,
        role: Role,
        worker_id: str,
        created: CreatedEngine,
        source: ModelSource,
        clock: Clock,
    ) -> None:
        self._config = config
        self._role_name: Role = role
        self._created = created
        self._source = source
        self._clock = clock
        self._own = Peer(worker_id, time.time_ns())
        self._state: WorkerState = "starting"
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()  # something happened, or the process is to stop
        self._has_members = False
        self._links: PrefillLinks | None = None  # of a decode worker

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain; 1 if the engine failed."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        config, created = self._config, self._created
        self._metrics = WorkerMetrics(self._role_name)
        self._registry = Registry(config.registry)
        self._engine_loop = EngineLoop(
            created.engine,
            on_result=lambda result: self._post(functools.partial(self._on_step, result)),
            clock=self._clock.monotonic,
        )
        self._transport: Transport = create_transport(
            kind=config.kv_transfer.transport,
            backends=config.kv_transfer.backends,
            write_timeout_ms=config.kv_transfer.write_timeout_ms,
            own=self._own,
            base_address=created.storage.base_address,
            num_blocks=created.storage.num_blocks,
            layout=created.kv_layout,
        )
        self._shell = WorkerShell(
            worker_id=self._own.worker_id,
            incarnation=self._own.incarnation,
            registry=self._registry,
            lease_s=config.registry.lease_ms / 1000,
            clock=self._clock,
            on_message=self._on_message,
            on_members=self._on_members,
            on_router_lost=lambda router, incarnation: self._role.on_router_lost(router, incarnation),
        )
        try:
            record = await self._make_record()
            self._build_role(record)
            self._engine_loop.start()
            await self._register(record)
            logger.info("%s worker %s serves %s", record.role, record.id, record.model.name)
            return await self._serve()
        finally:
            await self._close()

    async def _make_record(self) -> WorkerRecord:
        worker, created = self._config.worker, self._created
        metrics_address = self._metrics.serve(worker.host, worker.metrics_port)
        return WorkerRecord(
            id=self._own.worker_id,
            incarnation=self._own.incarnation,
            role=self._role_name,
            pid=os.getpid(),
            host=socket.gethostname(),
            address=await self._shell.bind(f"tcp://{worker.host}:{worker.port}"),
            metrics_address=metrics_address,
            model=ModelIdentity(
                name=self._config.model.served_name or self._source.default_name,
                source=self._config.model.source,
                fingerprint=created.model_fingerprint,
                dtype=created.dtype,
                max_model_len=created.max_model_len,
                vocab_size=created.model_config.vocab_size,
                eos_token_ids=tuple(created.model_config.eos_token_ids),
            ),
            kv_layout=created.kv_layout,
            endpoint=self._transport.endpoint,
            started_at=self._clock.unix(),
        )

    def _build_role(self, record: WorkerRecord) -> None:
        engine = EngineCommands(self._engine_loop, self._post)
        block_size = record.kv_layout.block_size
        self._role: WorkerRole
        self._ledger: HandoffLedger
        if record.role == "prefill":
            prefill = PrefillWorker(
                own=self._own,
                block_size=block_size,
                engine=engine,
                transport=self._transport,
                get_peer=lambda worker_id: self._connections.get(worker_id),
                mark_peer_failed=lambda peer: self._connections.mark_failed(peer),
                clock=self._clock,
                max_stall_s=self._max_stall_s(),
                send=self._shell.send,
                post=self._post,
                on_sealed=self._metrics.observe_timings,
                on_failed=self._metrics.request_failed,
            )
            self._role, self._ledger = prefill, prefill.ledger
            on_connected, on_lost = prefill.on_peer_connected, prefill.on_peer_lost
        else:
            links = PrefillLinks(
                self._own, lambda peer, message: decode.on_prefill_worker_message(peer, message)
            )
            decode = DecodeWorker(
                own=self._own,
                block_size=block_size,
                engine=engine,
                transport=self._transport,
                links=links,
                clock=self._clock,
                send=self._shell.send,
                on_first_token=self._metrics.observe_timings,
                on_failed=self._metrics.request_failed,
            )
            self._role, self._ledger, self._links = decode, decode.remote_prefills.ledger, links
            self._transport.on_notification(
                lambda payload: self._post(functools.partial(self._on_notification, decode, payload))
            )

            def lose(peer: Peer) -> None:
                links.close(peer)
                decode.remote_prefills.on_peer_lost(peer)

            on_connected, on_lost = links.open, lose
        self._connections = PeerConnections(
            self._transport, record, post=self._post, on_connected=on_connected, on_lost=on_lost
        )

    def _max_stall_s(self) -> float:
        """How long this process may stand still and still be sure that its lease has been renewed in time."""
        registry = self._config.registry
        return max(registry.lease_ms - 2 * registry.heartbeat_ms, registry.heartbeat_ms) / 1000

    async def _register(self, record: WorkerRecord) -> None:
        give_up_at = self._clock.monotonic() + _REGISTRY_WAIT_S
        while True:
            try:
                await self._shell.register(record)
                return
            except RegistryUnavailableError as error:
                if self._stop.is_set() or self._clock.monotonic() > give_up_at:
                    raise
                logger.warning("waiting for the registry: %s", error)
                await asyncio.sleep(1)

    async def _serve(self) -> int:
        interval_s = self._config.worker.load_report_ms / 1000
        while not self._stop.is_set():
            if not await self._report():
                return 1
            if self._registry.superseded.is_set():
                return 1
            if self._state == "ready" and self._engine_loop.is_idle and not self._role.num_active:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _IDLE_REPORT_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), interval_s)
        return await self._drain(interval_s)

    async def _drain(self, interval_s: float) -> int:
        logger.info("draining: %d requests in hand", self._role.num_active)
        self._state = "draining"
        self._role.drain()
        await self._report()
        give_up_at = self._clock.monotonic() + self._config.worker.drain_grace_ms / 1000
        next_report = self._clock.monotonic() + interval_s
        while self._role.num_active and self._clock.monotonic() < give_up_at:
            await asyncio.sleep(_DRAIN_POLL_S)
            if self._clock.monotonic() >= next_report:
                next_report += interval_s
                if not await self._report():
                    return 1
        if self._role.num_active:
            logger.warning("%d requests did not finish within the grace period", self._role.num_active)
        return 0

    async def _report(self) -> bool:
        """Publish the load; False if the engine has failed and the process must be started anew."""
        failure = self._engine_loop.failure
        if failure is not None:
            logger.critical("the engine failed: %r", failure)
            return False
        load = await asyncio.wrap_future(self._engine_loop.submit(lambda engine: engine.load()))
        if self._state == "starting" and self._has_members and self._connections.is_settled:
            self._state = "ready"
        self._role.on_tick()
        report = _load_report(load, self._state, len(self._ledger))
        self._metrics.set_load(report)
        self._shell.publish_load(report)
        return True

    def _on_signal(self) -> None:
        self._stop.set()
        self._wake.set()

    def _on_message(self, peer: str, incarnation: int, message: Message) -> None:
        self._wake.set()
        self._role.on_message(peer, incarnation, message)

    def _on_step(self, result: StepResult) -> None:
        self._wake.set()
        if result.num_tokens:
            self._metrics.observe_step(result.duration_ms, result.num_tokens)
        self._role.on_step(result)
        self._shell.publish_kv_events(result.blocks_stored, result.blocks_removed)

    def _on_members(self, members: Members) -> None:
        self._connections.update(members.workers)
        self._has_members = True

    def _on_notification(self, decode: DecodeWorker, payload: bytes) -> None:
        try:
            sealed = msgspec.msgpack.decode(payload, type=Sealed)
        except msgspec.DecodeError as error:
            logger.warning("dropped a malformed notification: %s", error)
            return
        decode.remote_prefills.on_sealed(sealed)

    def _post(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(function)

    async def _close(self) -> None:
        await self._shell.close()
        await asyncio.to_thread(self._engine_loop.stop)
        if self._links is not None:
            self._links.close_all()
        await asyncio.to_thread(self._transport.close)
        await self._registry.close()
        self._metrics.close()


def _load_report(load: EngineLoad, state: WorkerState, num_handoffs: int) -> LoadReport:
    return LoadReport(
        state=state,
        running=load.running,
        waiting=load.waiting,
        waiting_for_remote_kv=load.waiting_for_remote_kv,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_free=load.kv_blocks_free,
        kv_blocks_cached=load.kv_blocks_cached,
        kv_blocks_reserved=load.kv_blocks_reserved,
        kv_blocks_pinned=load.kv_blocks_held,
        kv_blocks_quarantined=load.kv_blocks_quarantined,
        handoffs_active=num_handoffs,
        num_preemptions=load.num_preemptions,
        step_ms=load.step_ms,
        prompt_tokens_total=load.prompt_tokens_total,
        generation_tokens_total=load.generation_tokens_total,
    )
