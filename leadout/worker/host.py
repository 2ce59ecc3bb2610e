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

from cluster.clock import Clock
from cluster.config.settings import LeadoutConfig
from cluster.load import LoadReport, WorkerState
from cluster.malformed import MalformedMessage
from cluster.members import Members, ModelIdentity, Peer, Role, WorkerRecord
from cluster.messages import Message
from cluster.metrics import WorkerMetrics
from cluster.problem_log import ProblemLog
from cluster.process_identity import LivenessProbe, own_process
from cluster.registry import Registry, RegistryUnavailableError
from cluster.rpc import ZmqNetwork
from cluster.signals import on_signal
from cluster.worker_membership import WorkerMembership
from cluster.worker_shell import WorkerShell
from decode_worker.decode_worker import DecodeWorker
from engine.create_engine import CreatedEngine
from engine.engine_commands import EngineCommands
from engine.engine_loop import EngineLoop
from engine.step_result import StepResult
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import Transport
from kv_transfer.verification import BlockVerifier
from leadout.worker.load_report import load_report
from leadout.worker.metric_events import MetricEvents
from model_files.model_source import ModelSource
from prefill_worker.prefill_worker import PrefillWorker
from worker_runtime.role import WorkerRole
from worker_runtime.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

_REGISTRY_WAIT_S = 60.0  # a worker may start before the registry does
_DRAIN_POLL_S = 0.05
_ABANDON_WAIT_S = 5.0  # for peers to confirm that they have stopped
_SLOW_LINK_SHARE = 0.25  # of what the path had when it was connected
_IDLE_REPORT_S = 1.0  # interval of load reports while nothing happens: four times less work for everybody


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
        self._slow_links: set[str] = set()  # peers

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain; 1 if the engine failed.

        Raises why it could not start: OSError and RpcError for an address that cannot be listened at,
        RegistryUnavailableError, StaleIncarnationError, TransportUnavailableError, ValueError.
        """
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            on_signal(number, self._on_signal)
        async with contextlib.AsyncExitStack() as opened:
            record = await self._open(opened)
            self._engine_loop.start()
            await self._register(record)
            logger.info("%s worker %s serves %s", record.role, record.id, record.model.name)
            return await self._serve()

    async def _open(self, opened: contextlib.AsyncExitStack) -> WorkerRecord:
        """Build and wire all parts; ``opened`` closes them, the last first."""
        config, created = self._config, self._created
        self._metrics = WorkerMetrics(self._role_name)
        opened.callback(self._metrics.close)
        self._registry = Registry(config.registry, self._clock)
        opened.push_async_callback(self._registry.close)
        self._probe = LivenessProbe()
        opened.callback(self._probe.close)
        self._transport: Transport = NixlTransport(
            own=self._own,
            backends=config.kv_transfer.backends,
            write_timeout_s=config.kv_transfer.write_timeout_ms / 1000,
            base_address=created.storage.base_address,
            num_blocks=created.storage.num_blocks,
            layout=created.kv_layout,
        )
        opened.push_async_callback(asyncio.to_thread, self._transport.close)
        verifier = BlockVerifier(
            config.kv_transfer.verify,
            base_address=created.storage.base_address,
            block_bytes=created.kv_layout.block_bytes,
            num_blocks=created.storage.num_blocks,
            memory=self._transport.endpoint.memory,
        )
        opened.callback(verifier.close)
        self._engine_loop = EngineLoop(
            created.engine,
            on_result=lambda result: self._post(functools.partial(self._on_step, result)),
            clock=self._clock,
        )
        opened.push_async_callback(asyncio.to_thread, self._engine_loop.stop)
        network = ZmqNetwork(self._own.worker_id, self._own.incarnation)
        self._shell = WorkerShell(
            network,
            self._clock,
            lease_s=config.registry.lease_ms / 1000,
            on_message=self._on_message,
            on_malformed=self._on_malformed,
            on_router_lost=self._on_router_lost,
            on_drain=self._on_signal,
        )
        opened.push_async_callback(self._shell.close)
        self._membership = WorkerMembership(self._registry, self._clock, self._on_members)
        opened.push_async_callback(self._membership.withdraw)
        record = await self._make_record()
        self._connections = PeerConnections(
            self._transport,
            record,
            post=self._post,
            check_gone=lambda one: asyncio.run_coroutine_threadsafe(self._probe.is_gone(one), self._loop),
            on_connected=self._on_peer_connected,
            on_lost=self._on_peer_lost,
        )
        runtime = WorkerRuntime(
            own=self._own,
            block_size=created.kv_layout.block_size,
            lease_s=config.registry.lease_ms / 1000,
            heartbeat_s=config.registry.heartbeat_ms / 1000,
            max_stall_s=config.registry.max_stall_s,
            clock=self._clock,
            engine=EngineCommands(self._engine_loop, self._post),
            transport=self._transport,
            verifier=verifier,
            peers=self._connections,
            network=network,
            send=self._shell.send,
            post=self._post,
        )
        role_type = PrefillWorker if self._role_name == "prefill" else DecodeWorker
        self._role: WorkerRole = role_type(runtime, MetricEvents(self._metrics))
        opened.callback(self._role.close)
        self._transport.on_notification(
            lambda payload: self._post(functools.partial(self._role.on_notification, payload))
        )
        return record

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
                dtype=created.number_format.name,
                kernels=created.kernels,
                max_model_len=created.max_model_len,
                vocab_size=created.model_config.vocab_size,
                eos_token_ids=tuple(created.model_config.eos_token_ids),
            ),
            kv_layout=created.kv_layout,
            endpoints=(self._transport.endpoint,),
            process=own_process(),
            started_at=self._clock.unix(),
        )

    async def _register(self, record: WorkerRecord) -> None:
        give_up_at = self._clock.monotonic() + _REGISTRY_WAIT_S
        problems = ProblemLog(logger, self._clock)
        while True:
            try:
                await self._membership.register(record)
                return
            except RegistryUnavailableError as error:
                if self._stop.is_set() or self._clock.monotonic() > give_up_at:
                    raise
                problems.report("register", "waiting for the registry: %s", error)
                await asyncio.sleep(1)

    async def _serve(self) -> int:
        """Until asked to stop; the exit status. Does not wait for the engine, whose steps may be long."""
        interval_s = self._config.worker.load_report_ms / 1000
        reporting = asyncio.create_task(self._report())
        try:
            while not self._stop.is_set() and not self._registry.superseded.is_set():
                self._tick()
                if reporting.done():
                    if not reporting.result():
                        return 1
                    reporting = asyncio.create_task(self._report())
                is_idle = self._engine_loop.is_idle and not self._role.num_active
                await self._pause(
                    _IDLE_REPORT_S if self._state == "ready" and is_idle else interval_s, is_idle
                )
        finally:
            reporting.cancel()
        if self._registry.superseded.is_set():
            return 1
        return await self._drain(interval_s)

    async def _pause(self, duration_s: float, is_idle: bool) -> None:
        """An idle worker wakes up when something happens."""
        event = self._wake if is_idle else self._stop
        if is_idle:
            self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), duration_s)

    async def _drain(self, interval_s: float) -> int:
        """Finish what is in hand; what does not finish in time is left to other workers."""
        logger.info("draining: %d requests in hand", self._role.num_active)
        self._state = "draining"
        self._role.drain()
        if not await self._until_done(self._config.worker.drain_grace_ms / 1000, interval_s):
            logger.warning("%d requests did not finish within the grace period", self._role.num_active)
            self._role.abandon("draining")
            await self._until_done(_ABANDON_WAIT_S, interval_s)
        return 0

    async def _until_done(self, wait_s: float, interval_s: float) -> bool:
        """Wait for at most ``wait_s`` until nothing is in hand."""
        give_up_at = self._clock.monotonic() + wait_s
        next_report = self._clock.monotonic()
        while True:
            if self._clock.monotonic() >= next_report:
                next_report += interval_s
                self._tick()
                if not await self._report():
                    return True  # the engine has failed: nothing will come of waiting
            if not self._role.num_active or self._clock.monotonic() >= give_up_at:
                return not self._role.num_active
            await asyncio.sleep(_DRAIN_POLL_S)

    def _tick(self) -> None:
        """What must happen in time, whatever the engine does."""
        began_at = self._engine_loop.step_began_at
        limit_s = self._config.engine.step_timeout_ms / 1000
        if began_at is not None and self._clock.monotonic() - began_at > limit_s:
            logger.critical("an engine step has run for more than %g s: this worker ends", limit_s)
            logging.shutdown()
            os._exit(1)  # the engine's thread cannot be stopped, and would keep the process
        self._shell.drop_lost_routers()
        self._role.on_tick()
        self._metrics.set_dropped(self._shell.dropped_messages)

    async def _report(self) -> bool:
        """Publish the load; False if the engine has failed and the process must be started anew."""
        failure = self._engine_loop.failure
        if failure is not None:
            logger.critical("the engine failed: %r", failure)
            return False
        try:
            load = await asyncio.wrap_future(self._engine_loop.submit(lambda engine: engine.load()))
        except (RuntimeError, asyncio.CancelledError):
            if self._engine_loop.failure is None:
                raise
            return await self._report()
        if self._state == "starting" and self._has_members and self._connections.is_settled:
            self._state = "ready"
        report = load_report(
            load, self._state, self._role.ledger, self._transport.links(), self._transport.counters()
        )
        self._note_slow_links(report)
        self._metrics.set_load(report)
        self._shell.publish_load(report)
        return True

    def _note_slow_links(self, report: LoadReport) -> None:
        """Say once when writes to a peer become much slower than the path was when it was connected."""
        slow = {
            link.peer: link for link in report.links if 0 < link.gbps < link.probe_gbps * _SLOW_LINK_SHARE
        }
        for peer in slow.keys() - self._slow_links:
            logger.warning(
                "writes to %s run at %.3g GB/s, and the path had %.3g GB/s when it was connected: is a "
                "slower transport in use, or the network congested?",
                peer,
                slow[peer].gbps,
                slow[peer].probe_gbps,
            )
        self._slow_links = set(slow)

    def _on_signal(self) -> None:
        self._stop.set()
        self._wake.set()

    def _on_message(self, peer: str, incarnation: int, message: Message) -> None:
        self._wake.set()
        self._role.on_message(peer, incarnation, message)

    def _on_malformed(self, peer: str, incarnation: int, message: MalformedMessage) -> None:
        self._wake.set()
        self._role.on_malformed(peer, incarnation, message)

    def _on_router_lost(self, router: str, incarnation: int) -> None:
        self._metrics.lease_expired("router")
        self._role.on_router_lost(router, incarnation)

    def _on_peer_connected(self, peer: Peer, record: WorkerRecord) -> None:
        self._role.on_peer_connected(peer, record)

    def _on_peer_lost(self, peer: Peer) -> None:
        self._role.on_peer_lost(peer)

    def _on_step(self, result: StepResult) -> None:
        self._wake.set()
        if result.num_tokens:
            self._metrics.observe_step(result.duration_ms, result.num_tokens)
        # First: a router that plans a failed request anew shall know what has landed here.
        self._shell.publish_kv_events(result.blocks_stored, result.blocks_removed)
        self._role.on_step(result)

    def _on_members(self, members: Members) -> None:
        self._shell.take_over(members)
        self._connections.update(members.workers)
        self._probe.keep_only([(peer.worker_id, peer.incarnation) for peer in self._connections.doubted])
        self._has_members = True

    def _post(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(function)
