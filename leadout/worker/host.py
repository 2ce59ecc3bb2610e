"""Hosts a worker in this process: opens what it stands on, drives it, and ends it in good order."""

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
from cluster.logging_setup import configure_logging
from cluster.members import Members, ModelIdentity, Peer, Role, WorkerRecord
from cluster.metrics import WorkerMetrics
from cluster.problem_log import ProblemLog
from cluster.process_identity import LivenessProbe, own_process
from cluster.registry import Registry, RegistryUnavailableError, StaleIncarnationError
from cluster.rpc import ZmqNetwork
from cluster.signals import on_signal
from cluster.worker_membership import WorkerMembership
from engine.create_engine import CreatedEngine
from engine.engine_commands import EngineCommands
from engine.engine_loop import EngineLoop
from engine.step_result import StepResult
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import Transport
from kv_transfer.verification import BlockVerifier
from leadout.worker.hosted_worker import HostedWorker
from leadout.worker.metric_events import MetricEvents
from model_files.model_source import ModelSource

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
        self._role: Role = role  # when it starts
        self._created = created
        self._source = source
        self._clock = clock
        self._own = Peer(worker_id, time.time_ns())
        self._state: WorkerState = "starting"
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()  # something happened, or the process is to stop
        self._changed = asyncio.Event()  # the record, since it was written into the registry
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
            await self._open(opened)
            self._engine_loop.start()
            await self._register()
            record = self._worker.record
            logger.info("serves %s as %s", record.model.name, record.role)
            return await self._serve()

    async def _open(self, opened: contextlib.AsyncExitStack) -> None:
        """Build and wire all parts; ``opened`` closes them, the last first."""
        config, created = self._config, self._created
        self._metrics = WorkerMetrics()
        self._metrics.set_role(self._role)
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
        self._worker = HostedWorker(
            self._make_record(),
            registry=config.registry,
            clock=self._clock,
            network=ZmqNetwork(self._own.worker_id, self._own.incarnation),
            engine=EngineCommands(self._engine_loop, self._post),
            transport=self._transport,
            verifier=verifier,
            events=MetricEvents(self._metrics),
            post=self._post,
            check_gone=lambda one: asyncio.run_coroutine_threadsafe(self._probe.is_gone(one), self._loop),
            on_changed=self._on_record_changed,
            on_drain=self._on_signal,
            on_activity=self._wake.set,
        )
        opened.push_async_callback(self._worker.close)
        self._membership = WorkerMembership(self._registry, self._clock, self._on_members)
        opened.push_async_callback(self._membership.withdraw)
        await self._worker.bind(f"tcp://{config.worker.host}:{config.worker.port}")
        self._transport.on_notification(
            lambda payload: self._post(functools.partial(self._worker.on_notification, payload))
        )

    def _make_record(self) -> WorkerRecord:
        worker, created = self._config.worker, self._created
        return WorkerRecord(
            id=self._own.worker_id,
            incarnation=self._own.incarnation,
            role=self._role,
            pid=os.getpid(),
            host=socket.gethostname(),
            address="",  # see HostedWorker.bind
            metrics_address=self._metrics.serve(worker.host, worker.metrics_port),
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

    async def _register(self) -> None:
        give_up_at = self._clock.monotonic() + _REGISTRY_WAIT_S
        problems = ProblemLog(logger, self._clock)
        while True:
            try:
                await self._membership.register(self._worker.record)
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
        advertising = asyncio.create_task(self._advertise_changes())
        try:
            while not self._stop.is_set() and not self._registry.superseded.is_set():
                self._tick()
                if reporting.done():
                    if not reporting.result():
                        return 1
                    reporting = asyncio.create_task(self._report())
                is_idle = self._engine_loop.is_idle and not self._worker.num_active
                await self._pause(
                    _IDLE_REPORT_S if self._state == "ready" and is_idle else interval_s, is_idle
                )
        finally:
            reporting.cancel()
            advertising.cancel()
        if self._registry.superseded.is_set():
            return 1
        return await self._drain(interval_s)

    async def _advertise_changes(self) -> None:
        """Write the record into the registry whenever it has changed. Renewals do so where this fails."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._membership.update(self._worker.record)
            except RegistryUnavailableError as error:
                logger.warning("the registry will show this worker's role later: %s", error)
            except StaleIncarnationError:
                self._registry.superseded.set()
                return

    async def _pause(self, duration_s: float, is_idle: bool) -> None:
        """An idle worker wakes up when something happens."""
        event = self._wake if is_idle else self._stop
        if is_idle:
            self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), duration_s)

    async def _drain(self, interval_s: float) -> int:
        """Finish what is in hand; what does not finish in time is left to other workers."""
        logger.info("draining: %d requests in hand", self._worker.num_active)
        self._state = "draining"
        self._worker.drain()
        if not await self._until_done(self._config.worker.drain_grace_ms / 1000, interval_s):
            logger.warning("%d requests did not finish within the grace period", self._worker.num_active)
            self._worker.abandon("draining")
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
            if not self._worker.num_active or self._clock.monotonic() >= give_up_at:
                return not self._worker.num_active
            await asyncio.sleep(_DRAIN_POLL_S)

    def _tick(self) -> None:
        """What must happen in time, whatever the engine does."""
        began_at = self._engine_loop.step_began_at
        limit_s = self._config.engine.step_timeout_ms / 1000
        if began_at is not None and self._clock.monotonic() - began_at > limit_s:
            logger.critical("an engine step has run for more than %g s: this worker ends", limit_s)
            logging.shutdown()
            os._exit(1)  # the engine's thread cannot be stopped, and would keep the process
        self._worker.on_tick()
        self._metrics.set_dropped(self._worker.shell.dropped_messages)

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
        if self._state == "starting" and self._worker.is_connected:
            self._state = "ready"
        report = self._worker.report(load, self._state)
        self._note_slow_links(report)
        self._metrics.set_load(report)
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

    def _on_record_changed(self, record: WorkerRecord) -> None:
        configure_logging(self._config.log, process=record.id, role=record.role)
        self._metrics.set_role(record.role)
        self._changed.set()

    def _on_step(self, result: StepResult) -> None:
        if result.num_tokens:
            self._metrics.observe_step(result.duration_ms, result.num_tokens)
        self._worker.on_step(result)

    def _on_members(self, members: Members) -> None:
        self._worker.on_members(members)
        self._probe.keep_only([(peer.worker_id, peer.incarnation) for peer in self._worker.doubted])

    def _post(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(function)
