"""A worker's place in the registry, and what it hears of the others from there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from cluster.clock import Clock
from cluster.members import Members, WorkerRecord
from cluster.problem_log import ProblemLog
from cluster.registry import Registry

logger = logging.getLogger(__name__)

_WATCH_RETRY_S = 1.0


class WorkerMembership:
    """Keeps one worker registered, and tells it who comes and goes. Lives in one asyncio loop."""

    def __init__(self, registry: Registry, clock: Clock, on_members: Callable[[Members], None]) -> None:
        """``on_members`` runs in the loop; its exceptions are logged."""
        self._registry = registry
        self._problems = ProblemLog(logger, clock)
        self._on_members = on_members
        self._record: WorkerRecord | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def register(self, record: WorkerRecord) -> None:
        """Enter the cluster, and stay in it until ``withdraw``. Raises the registry's errors."""
        self._record = record
        await self._registry.register(record)
        self._watch_task = asyncio.create_task(self._watch(), name="registry watch")

    async def update(self, record: WorkerRecord) -> None:
        """Show the others a newer state of this worker. Raises the registry's errors; see Registry.update."""
        self._record = record
        await self._registry.update(record)

    async def withdraw(self) -> None:
        """Leave the registry: no new work comes. Failures are logged: the lease ends it too."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch_task
            self._watch_task = None
        if self._record is not None:
            try:
                await self._registry.withdraw(self._record)
            except Exception as error:
                logger.warning("could not withdraw from the registry, the lease will end: %s", error)
            self._record = None

    async def _watch(self) -> None:
        while True:
            try:
                async for members in self._registry.watch():
                    self._take_over(members)
            except Exception as error:  # a worker that no longer sees who comes and goes is of little use
                message = "watching the registry failed, trying again each %s s"
                self._problems.report("watch", message, _WATCH_RETRY_S, level=logging.ERROR, error=error)
            await asyncio.sleep(_WATCH_RETRY_S)

    def _take_over(self, members: Members) -> None:
        try:
            self._on_members(members)
        except Exception as error:
            message = "taking over the list of members failed"
            self._problems.report("members", message, level=logging.ERROR, error=error)
