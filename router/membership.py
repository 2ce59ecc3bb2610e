"""Keeps a router registered, and its view of the cluster current."""

from __future__ import annotations

import asyncio
import logging

from cluster.clock import Clock
from cluster.members import RouterRecord
from cluster.problem_log import ProblemLog
from cluster.registry import Registry, RegistryUnavailableError
from router.cluster_view import ClusterView

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


class Membership:
    """A router's place in the registry. The registry may come later than the router, and may go away."""

    def __init__(
        self,
        registry: Registry,
        record: RouterRecord,
        view: ClusterView,
        clock: Clock,
        *,
        heartbeat_s: float,
        max_stall_s: float,
        max_registry_outage_s: float,
    ) -> None:
        """After a standstill of ``max_stall_s`` the workers may have given this router up.

        Without the registry, what is known of the members is good for ``max_registry_outage_s``.
        """
        self._registry = registry
        self._record = record
        self._view = view
        self._clock = clock
        self._problems = ProblemLog(logger, clock)
        self._heartbeat_s = heartbeat_s
        self._max_stall_s = max_stall_s
        self._max_registry_outage_s = max_registry_outage_s
        self._has_members = False
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the router does not know the cluster's members; "" while it does."""
        if not self._has_members:
            return self._problem or "the members of the cluster are not known yet"
        outage_s = self._registry.seconds_since_contact
        if outage_s > self._max_registry_outage_s:
            return f"the registry has not answered for {outage_s:.0f} s"
        return ""

    async def run(self) -> None:
        """Register, follow the members and renew subscriptions; ends only by cancellation or an error.

        Raises StaleIncarnationError if a newer process has taken this router's id.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._register(), name="register router")
            tasks.create_task(self._watch(), name="registry watch")
            tasks.create_task(self._renew_subscriptions(), name="worker subscriptions")

    async def withdraw(self) -> None:
        """Leave the registry. Failures are logged: the lease ends it too."""
        try:
            await self._registry.withdraw(self._record)
        except RegistryUnavailableError as error:
            logger.warning("could not withdraw from the registry, the lease will end: %s", error)

    async def _register(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self._registry.register(self._record)
                self._problems.over("register", "the registry is there")
                return
            except RegistryUnavailableError as error:
                self._problem = str(error)
                self._problems.report("register", "waiting for the registry: %s", error)
                await asyncio.sleep(retry_s)
                retry_s = min(_LONGEST_RETRY_S, retry_s * 2)

    async def _watch(self) -> None:
        async for members in self._registry.watch():
            self._has_members = True
            try:
                self._view.update(members)
            except Exception as error:  # the next change, or the next heartbeat, brings the members again
                message = "taking over the list of members failed"
                self._problems.report("members", message, level=logging.ERROR, error=error)

    async def _renew_subscriptions(self) -> None:
        last = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            now = self._clock.monotonic()
            if now - last > self._heartbeat_s + self._max_stall_s:
                self._problems.report(
                    "stall", "this router stood still for %.1f s: its requests start anew", now - last
                )
                self._view.suspect_all()
            last = now
            self._view.heartbeat()
