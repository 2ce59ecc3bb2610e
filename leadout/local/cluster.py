"""A whole cluster on one machine: starts its processes, watches them, starts them again, and stops them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.config.settings import LeadoutConfig, to_environment
from leadout.cpu_plan import available_cores, thread_environment, threads_per_process
from leadout.errors import UserError
from leadout.local.child_process import ChildProcess, ChildSpec, describe_exit
from leadout.local.embedded_registry import EmbeddedRegistry, EmbeddedRegistryError
from leadout.local.log_folder import create_log_folder
from leadout.local.restart_policy import GiveUp, RestartPolicy

_POLL_S = 0.1  # while something is starting
_WATCH_S = 1.0
_KILL_GRACE_S = 3.0
_START_TIMEOUT_S = 600.0  # a big model loads for minutes


@dataclass(frozen=True, slots=True)
class ClusterEvents:
    """What the launcher tells its user. Called in the event loop."""

    on_state: Callable[[str, str], None]  # process name, state in words
    on_line: Callable[[str, str], None]  # process name, a line of its log
    on_notice: Callable[[str], None]  # something happened that a person should see


class LocalCluster:
    """Router, workers and, unless the configuration names another, the registry.

    ``start`` fails if any process dies before it was ready. After that a process that dies is started again,
    with growing delays, until its restart policy gives it up. A worker that was drained has ended as asked.
    """

    def __init__(
        self,
        config: LeadoutConfig,
        events: ClusterEvents,
        *,
        own_registry: bool,
        log_folder: Path | None = None,
    ) -> None:
        self._events = events
        self._registry = EmbeddedRegistry() if own_registry else None
        # One client, and without certificates to load: the router is asked often.
        self._client = httpx.AsyncClient(
            timeout=5, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._config = config
        self._log_folder = log_folder
        self._children: dict[str, ChildProcess] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._ready_since: dict[str, float] = {}
        self._specs: list[ChildSpec] = []
        self._is_stopping = False
        self.given_up = asyncio.Event()  # a process died too often
        self.url = ""

    @property
    def log_folder(self) -> Path:
        """Where each process has its log. Only after ``start`` unless it was given."""
        assert self._log_folder is not None, "start() first"
        return self._log_folder

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, the registry included."""
        pids = {name: child.pid for name, child in self._children.items()}
        if self._registry is not None and self._registry.is_running():
            pids["registry"] = self._registry.pid
        return pids

    async def start(self) -> dict[str, Any]:
        """Start everything and wait until it serves; returns the router's ``/cluster``.

        Raises UserError, with the log's last lines, if a process dies meanwhile.
        """
        host = self._config.router.host
        port = _claim_port(host, self._config.router.port)
        shown_host = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
        self.url = f"http://{shown_host}:{port}"
        if self._log_folder is None:
            self._log_folder = create_log_folder()
        registry_url = self._config.registry.url
        if self._registry is not None:
            self._registry.start()
            registry_url = self._registry.url
        self._specs = _child_specs(self._config, registry_url, port)
        for spec in self._specs:
            self._spawn(spec)
        await self._wait_until_ready()
        self._supervisors = [asyncio.create_task(self._supervise(spec)) for spec in self._specs]
        self._supervisors.append(asyncio.create_task(self._watch()))
        return await self.cluster_state() or {}

    async def cluster_state(self) -> dict[str, Any] | None:
        """The router's ``/cluster``; None if it does not answer."""
        try:
            response = await self._client.get(f"{self.url}/cluster")
            response.raise_for_status()
            state: dict[str, Any] = response.json()
            return state
        except (httpx.HTTPError, ValueError):
            return None

    async def stop(self) -> None:
        """Stop the router, then the workers, then the registry. Each gets a bounded time to finish."""
        self._is_stopping = True
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        routers = [child for child in self._children.values() if child.spec.role == "router"]
        workers = [child for child in self._children.values() if child.spec.role != "router"]
        await self._terminate(routers, self._config.router.drain_grace_ms / 1000 + _KILL_GRACE_S)
        await self._terminate(workers, self._config.worker.drain_grace_ms / 1000 + _KILL_GRACE_S)
        if self._registry is not None:
            self._registry.stop()
        await self._client.aclose()

    def kill(self) -> None:
        """Stop everything at once."""
        self._is_stopping = True
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)

    def _spawn(self, spec: ChildSpec) -> ChildProcess:
        self._events.on_state(spec.name, "starting" if spec.role == "router" else f"starting as {spec.role}")
        self._ready_since.pop(spec.name, None)
        child = ChildProcess(
            spec,
            self.log_folder / f"{spec.name}.log",
            on_line=lambda line: self._events.on_line(spec.name, line),
        )
        self._children[spec.name] = child
        return child

    async def _wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < give_up_at:
            for name, child in self._children.items():
                if not child.is_running:
                    status = await child.wait()
                    raise UserError(
                        f"{name} {describe_exit(status)} while starting:\n" + "\n".join(child.tail)
                    )
            await self._note_ready()
            if len(self._ready_since) == len(self._specs):
                return
            await asyncio.sleep(_POLL_S)
        missing = [spec.name for spec in self._specs if spec.name not in self._ready_since]
        raise UserError(f"not ready after {_START_TIMEOUT_S:.0f} s: {', '.join(missing)}")

    async def _note_ready(self) -> None:
        """Mark the processes that the router reports as ready, and the router itself."""
        state = await self.cluster_state()
        if state is None:
            return
        ready = {
            (worker["id"], worker["pid"]): f"ready as {worker['role']}"
            for worker in state["workers"]
            if worker["state"] == "ready"
        }
        for name, child in self._children.items():
            in_words = "ready" if child.spec.role == "router" else ready.get((name, child.pid))
            if in_words is not None and name not in self._ready_since:
                self._ready_since[name] = time.monotonic()
                self._events.on_state(name, in_words)

    async def _supervise(self, spec: ChildSpec) -> None:
        policy = RestartPolicy()
        child = self._children[spec.name]
        while True:
            status = await child.wait()
            if self._is_stopping:
                return
            if status == 0 and spec.role != "router":
                self._events.on_state(spec.name, "drained")
                self._events.on_notice(f"{spec.name} has drained and is not started again")
                return
            decision = policy.died(time.monotonic(), self._ready_since.get(spec.name))
            if isinstance(decision, GiveUp):
                self._events.on_notice(
                    f"{spec.name} {describe_exit(status)} and is not started again: {decision.reason}\n"
                    + "\n".join(child.tail)
                )
                self.given_up.set()
                return
            self._events.on_notice(
                f"{spec.name} {describe_exit(status)}, starting it again in {decision.delay_s:g} s"
            )
            await asyncio.sleep(decision.delay_s)
            try:
                child = self._spawn(spec)
            except OSError as error:
                self._events.on_notice(f"{spec.name} cannot be started again: {error}")
                self.given_up.set()
                return

    async def _watch(self) -> None:
        """Keep the registry alive, and learn when restarted processes are ready."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._registry is not None and not self._registry.is_running():
                self._events.on_notice("the registry died, starting it again")
                try:
                    self._registry.start()
                except (EmbeddedRegistryError, OSError) as error:
                    self._events.on_notice(f"the registry is not started again: {error}")
                    self.given_up.set()
                    return
            if len(self._ready_since) < len(self._specs):
                await self._note_ready()

    async def _terminate(self, children: list[ChildProcess], grace_s: float) -> None:
        for child in children:
            child.send_signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.wait()) for child in children]
        if not waits:
            return
        _done, late = await asyncio.wait(waits, timeout=grace_s)
        if late:
            for child in children:
                child.send_signal(signal.SIGKILL)
            await asyncio.wait(late)


def _child_specs(config: LeadoutConfig, registry_url: str, port: int) -> list[ChildSpec]:
    """The router and the workers, those first that start as prefill workers."""
    roles = ["prefill"] * config.local.prefill + ["decode"] * config.local.decode
    num_threads = config.engine.num_threads or threads_per_process(available_cores(), len(roles))
    environment = {
        **os.environ,
        **to_environment(config),
        "LEADOUT_REGISTRY__URL": registry_url,
        "LEADOUT_ROUTER__PORT": str(port),
        "LEADOUT_ENGINE__NUM_THREADS": str(num_threads),
        # Several workers on one machine cannot share a port.
        "LEADOUT_WORKER__PORT": "0",
        "LEADOUT_WORKER__METRICS_PORT": str(min(0, config.worker.metrics_port)),
        "PYTHONUNBUFFERED": "1",
        **thread_environment(num_threads),
    }
    environment.pop("LEADOUT_CONFIG", None)  # its values are in the variables
    program = [sys.executable, "-m", "leadout"]
    specs = [ChildSpec("router-0", "router", [*program, "router", "--id", "router-0"], environment)]
    for index, role in enumerate(roles):
        name = f"worker-{index}"
        specs.append(
            ChildSpec(
                name,
                role,
                [*program, "worker", "--role", role, "--id", name],
                environment,
                num_threads=num_threads,
            )
        )
    return specs


def _claim_port(host: str, port: int) -> int:
    """A port that is free now: ``port``, or any if that is 0. Raises UserError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen at {host}:{port}: {error.strerror}; choose another port with --port"
            ) from None
        return int(probe.getsockname()[1])
