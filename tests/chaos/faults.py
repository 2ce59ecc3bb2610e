"""Faults of one process of a running cluster: killed, or frozen for a while."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.integration.running_cluster import RunningCluster

RECOVERY_TIMEOUT_S = 90.0  # a worker loads its model, on a machine that does other things as well


@dataclass(frozen=True)
class Kill:
    """``kill -9``; the launcher starts it again."""

    process: str  # a worker's id, "router-0" or "registry"

    def __str__(self) -> str:
        return f"kill -9 {self.process}"


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP, and SIGCONT after ``duration_s``."""

    process: str
    duration_s: float

    def __str__(self) -> str:
        return f"freeze {self.process} for {self.duration_s:g} s"


Fault = Kill | Freeze


def inject(cluster: RunningCluster, fault: Fault) -> float:
    """Do it, and return when it began, in monotonic seconds. A frozen process goes on when this returns."""
    if isinstance(fault, Freeze):
        began_at = time.monotonic()
        with frozen(cluster, fault.process):
            time.sleep(fault.duration_s)
        return began_at
    pid = cluster.pid(fault.process)
    began_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    cluster.wait_until(lambda: cluster.pids().get(fault.process, pid) != pid, RECOVERY_TIMEOUT_S)
    return began_at


@contextmanager
def frozen(cluster: RunningCluster, process: str) -> Iterator[int]:
    """Stop a process, and let it go on at the end unless it has been killed meanwhile. Yields its pid."""
    pid = cluster.pid(process)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        if cluster.pids().get(process) == pid:
            os.kill(pid, signal.SIGCONT)


def wait_until_whole(cluster: RunningCluster) -> None:
    """Until every process is back and takes requests."""
    cluster.wait_until(cluster.is_whole, RECOVERY_TIMEOUT_S)


def wait_until_busy(cluster: RunningCluster, process: str, *, num_requests: int = 1) -> None:
    """Until a worker runs or hands over so many, as it last reported. Other processes always are busy."""
    if process not in ("router-0", "registry"):
        cluster.wait_until(lambda: _is_busy(cluster, process, num_requests), RECOVERY_TIMEOUT_S)


def _is_busy(cluster: RunningCluster, worker: str, num_requests: int) -> bool:
    return any(
        one["id"] == worker
        and one["load"]["queue"]["running"] + sum(one["load"]["handoffs"].values()) >= num_requests
        for one in cluster.workers()
    )
