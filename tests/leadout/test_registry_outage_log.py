"""What an hour without the registry costs in lines of the log, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable

import pytest

from cluster.config.settings import RegistryConfig
from cluster.members import RouterRecord
from cluster.registry import Registry
from cluster.rpc import RpcConnection
from cluster.worker_membership import WorkerMembership
from leadout.local.embedded_registry import EmbeddedRegistry
from router.cluster_view import ClusterView
from router.membership import Membership
from tests.router.factories import worker_record

pytestmark = pytest.mark.processes

HOUR_S = 3600.0


class SkippingClock:
    """Real time, and what was skipped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s

    def unix(self) -> float:
        return time.time() + self.skipped_s


class SkippingSelector(selectors.DefaultSelector):
    """While it skips it waits for no timer: where no file is ready, the clock goes on to the next one."""

    def __init__(self, clock: SkippingClock) -> None:
        super().__init__()
        self._clock = clock
        self.is_skipping = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.is_skipping or timeout is None:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._clock.skipped_s += max(timeout, 0)
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose timers follow a SkippingClock."""

    def __init__(self, clock: SkippingClock) -> None:
        self._clock = clock
        self.selector = SkippingSelector(clock)
        super().__init__(self.selector)

    def time(self) -> float:
        return self._clock.monotonic()


def test_an_hour_without_the_registry_costs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A worker and a router go on renewing their leases and looking for the members, and say so rarely."""
    caplog.set_level(logging.INFO)
    clock = SkippingClock()
    server = EmbeddedRegistry()
    server.start()
    try:
        with asyncio.Runner(loop_factory=lambda: SkippingLoop(clock)) as runner:
            runner.run(_outage(server, clock, caplog))
    finally:
        server.stop()


async def _outage(server: EmbeddedRegistry, clock: SkippingClock, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    config = RegistryConfig(url=server.url)
    registries = [Registry(config, clock) for _ in range(2)]
    worker = WorkerMembership(registries[0], clock, on_members=lambda _: None)
    view = ClusterView(
        connect=lambda record, on_message, on_disconnected: RpcConnection(
            record.address,
            sender="router-0",
            incarnation=1,
            on_message=on_message,
            on_disconnected=on_disconnected,
        ),
        on_tokens=lambda *_: None,
        on_worker_lost=lambda _: None,
        on_dropped=lambda _: None,
    )
    membership = Membership(
        registries[1],
        RouterRecord(id="router-0", incarnation=1, pid=1, host="localhost", address="http://localhost"),
        view,
        clock,
        heartbeat_s=config.heartbeat_ms / 1000,
        max_stall_s=config.max_stall_s,
        max_registry_outage_s=config.max_outage_ms / 1000,
    )
    await worker.register(worker_record("worker-0"))
    running = asyncio.create_task(membership.run())
    await _until(lambda: len(view.state.workers) == 1 and len(view.routers) == 1)
    os.kill(server.pid, signal.SIGKILL)
    await _until(lambda: not server.is_running())
    caplog.clear()
    began_at = clock.monotonic()
    loop.selector.is_skipping = True
    await asyncio.sleep(HOUR_S)
    loop.selector.is_skipping = False
    assert clock.monotonic() - began_at >= HOUR_S
    assert registries[0].seconds_since_contact > HOUR_S - 10
    lines = [record.getMessage() for record in caplog.records]
    assert 4 <= len(lines) <= 60, "\n".join(lines)
    assert not any(record.exc_info for record in caplog.records)
    caplog.clear()
    server.start()
    await _until(lambda: caplog.text.count("the registry answers again") == 2)
    await _until(lambda: caplog.text.count("is renewed again") == 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    view.close()
    await worker.withdraw()
    for registry in registries:
        await registry.close()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 — nothing sets an event
            await asyncio.sleep(0.01)
