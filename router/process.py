"""The router process: HTTP server, registry and connections to workers, from start to clean exit."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Mapping

import uvloop

from cluster.clock import SystemClock
from cluster.config.settings import LeadoutConfig
from cluster.logging_setup import configure_logging
from cluster.members import RouterRecord
from cluster.registry import Registry, StaleIncarnationError
from cluster.rpc import ZmqNetwork
from model_files.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults, generation_defaults
from model_files.model_source import ModelSource, resolve_model
from router.app import create_app
from router.http.server import HttpServer, bind_listener, http_limits, listener_url
from router.membership import Membership
from router.served_model import RouterModel
from router.services import RouterServices, build_services
from router.text_model_files import load_text_model_of, load_text_models

logger = logging.getLogger(__name__)

_WARM_UP_POLL_S = 0.5
_CANCEL_GRACE_S = 2  # for cancelled requests to tell their clients


def run_router(config: LeadoutConfig, router_id: str | None = None) -> int:
    """Serve the API until SIGTERM or SIGINT; returns the exit status.

    The server answers before any worker or the registry is there; ``/ready`` says when it can serve. Raises
    what is wrong with the configuration or the machine: OSError if the port cannot be bound,
    ModelNotFoundError, TokenizerError, ChatTemplateError, GgufFormatError.
    """
    router_id = router_id or f"router-{socket.gethostname()}-{os.getpid()}"
    configure_logging(config.log, process=router_id)
    # One text is tokenized at a time, in the event loop: a pool of threads would only be a detour.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    listener = bind_listener(config.router.host, config.router.port)
    source = resolve_model(config.model.source)
    router = RouterProcess(
        config,
        router_id=router_id,
        sources={config.model.served_name or source.default_name: source},
        listener=listener,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(router.run())


def _defaults(config: LeadoutConfig, source: ModelSource) -> GenerationDefaults:
    return generation_defaults(source) if config.model.generation_defaults == "auto" else OPENAI_DEFAULTS


class RouterProcess:
    """The parts of one router process and their lifetime."""

    def __init__(
        self,
        config: LeadoutConfig,
        *,
        router_id: str,
        sources: Mapping[str, ModelSource],
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._incarnation = time.time_ns()
        self._listener = listener
        self._num_signals = 0
        self._signalled = asyncio.Event()
        self.record = RouterRecord(
            id=router_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            address=listener_url(listener),
            started_at=time.time(),
        )
        self.services: RouterServices = build_services(
            router_id=router_id,
            models={
                name: RouterModel(text=load_text_model_of(source), defaults=_defaults(config, source))
                for name, source in sources.items()
            },
            load_text_models=functools.partial(load_text_models, sources),
            config=config.router,
            connect=ZmqNetwork(router_id, self._incarnation).connect,
        )

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain: 0. 1 if a newer process has this router's id."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        drain_s = self._config.router.drain_grace_ms / 1000
        server = HttpServer(
            create_app(
                self.services,
                cors_origins=self._config.router.cors_origins,
                allowed_hosts=[*self._config.router.allowed_hosts, self._config.router.host],
            ),
            self._listener,
            limits=http_limits(self._config.router),
            metrics=self.services.metrics,
            rejections=self.services.rejections,
            shutdown_grace_s=math.ceil(drain_s) + _CANCEL_GRACE_S,
        )
        registry = Registry(self._config.registry)
        membership = Membership(
            registry,
            self.record,
            self.services.view,
            SystemClock(),
            heartbeat_s=self._config.registry.heartbeat_ms / 1000,
            max_stall_s=self._config.registry.max_stall_s,
            max_registry_outage_s=self._config.registry.max_outage_ms / 1000,
        )
        self.services.registry_problem = lambda: membership.problem
        serving = asyncio.create_task(server.serve(), name="http server")
        warming = asyncio.create_task(self._warm_up(), name="first process for bodies")
        member = asyncio.create_task(membership.run(), name="membership")
        logger.info(
            "router %s serves %s at %s", self.record.id, ", ".join(self.services.models), self.record.address
        )
        try:
            status = await self._until_stopped(serving, member, registry)
            await self._drain(server, serving, drain_s)
            return status
        finally:
            serving.cancel()
            member.cancel()
            warming.cancel()
            await asyncio.gather(serving, member, warming, return_exceptions=True)
            await membership.withdraw()
            await self.services.body_workers.close()
            self.services.view.close()
            await registry.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin the shutdown; the second call cuts the drain short."""
        self._num_signals += 1
        self._signalled.set()

    async def _warm_up(self) -> None:
        """Start the first process for bodies, but not while the workers need the machine to get ready."""
        while self.services.not_ready_reasons():  # noqa: ASYNC110 - made of many things, not an event
            await asyncio.sleep(_WARM_UP_POLL_S)
        try:
            await self.services.body_workers.start()
        except (OSError, EOFError, TimeoutError) as error:
            logger.warning("no process for large bodies could be started; the next one is tried: %r", error)

    async def _until_stopped(
        self, serving: asyncio.Task[None], member: asyncio.Task[None], registry: Registry
    ) -> int:
        signalled = asyncio.create_task(self._signalled.wait())
        superseded = asyncio.create_task(registry.superseded.wait())
        try:
            await asyncio.wait({serving, member, signalled, superseded}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            superseded.cancel()
        if serving.done():
            serving.result()  # raises what ended it
        if member.done():
            error = member.exception()
            if not isinstance(error, ExceptionGroup) or error.subgroup(StaleIncarnationError) is None:
                member.result()  # raises what ended it
        if member.done() or registry.superseded.is_set():
            logger.error("stopping: a newer process has the id %s", self.record.id)
            return 1
        return 0

    async def _drain(self, server: HttpServer, serving: asyncio.Task[None], drain_s: float) -> None:
        """Stop accepting, let what runs finish for ``drain_s``, then cancel the rest."""
        services = self.services
        services.is_draining = True
        logger.info("draining: %d sequences in flight", len(services.dispatcher.in_flight))
        server.stop_accepting()
        if self._num_signals < 2:
            self._signalled.clear()
            impatient = asyncio.create_task(self._signalled.wait())
            await asyncio.wait({serving, impatient}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            impatient.cancel()
        if not serving.done():
            logger.warning("cancelling %d sequences", len(services.dispatcher.in_flight))
            services.queue.close_all("shutdown")
            await asyncio.wait({serving}, timeout=_CANCEL_GRACE_S)
