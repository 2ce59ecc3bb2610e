"""One life of a router: its real dispatcher and view, over the world's network and clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.config.settings import RouterConfig
from cluster.members import Peer
from cluster.sampling_params import SamplingParams
from router.cluster_view import ClusterView
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.in_flight import Generation
from router.dispatch.request_queue import RequestQueue
from router.metrics import RouterMetrics
from router.policy.longest_prefix import LongestPrefixPolicy
from router.services import policy_settings
from tests.simulation.under_way import SimulatedConnection

if TYPE_CHECKING:
    from tests.simulation.cluster_world import ClusterWorld

ROUTER = "router-0"


@dataclass(eq=False)
class SimulatedTimer:
    """See ``cluster.clock.Timer``."""

    due: float
    function: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(eq=False)
class Client:
    """One API request and what its client has got."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    timeout_s: float
    started_at: float
    generation: Generation | None = None
    tokens: list[int] = field(default_factory=list)
    ending: str = ""
    ended_at: float = 0.0
    num_attempts: int = 0
    lost_for_s: float = 0.0  # since the worker was lost, where it ended with an error


class Router:
    """One life of the router."""

    def __init__(self, world: ClusterWorld, incarnation: int) -> None:
        self.world = world
        self.peer = Peer(ROUTER, incarnation)
        self.timers: list[SimulatedTimer] = []
        self.connections: dict[Peer, SimulatedConnection] = {}
        self.frozen_since: float | None = None
        self.view = ClusterView(
            connect=lambda record, on_message, on_disconnected: SimulatedConnection(
                lambda: world.packets, self.peer, self.connections, record, on_message, on_disconnected
            ),
            on_tokens=lambda worker, batch: self.dispatcher.on_tokens(worker, batch),
            on_worker_lost=lambda worker: self.dispatcher.on_worker_lost(worker),
            on_dropped=lambda reason: world.count(f"router dropped: {reason}"),
        )
        metrics = RouterMetrics()
        self.dispatcher = Dispatcher(
            self.view,
            LongestPrefixPolicy(policy_settings(RouterConfig(local_prefill_max_tokens=2))),
            metrics,
            world.clock,
        )
        self.queue = RequestQueue(
            self.dispatcher,
            metrics,
            world.clock,
            max_sequences=1_000_000,
            max_waiting=0,
            max_wait_ms=1,
            timer=self._timer,
        )

    def _timer(self, delay_s: float, function: Callable[[], None]) -> SimulatedTimer:
        timer = SimulatedTimer(self.world.clock.monotonic() + delay_s, function)
        self.timers.append(timer)
        return timer

    def fire_timers(self) -> None:
        now = self.world.clock.monotonic()
        due = [timer for timer in self.timers if timer.due <= now]
        self.timers = [timer for timer in self.timers if timer.due > now]
        for timer in sorted(due, key=lambda one: one.due):
            if not timer.is_cancelled:
                timer.function()
