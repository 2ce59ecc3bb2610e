"""Which cores and how many threads each engine process gets on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Core:
    """One logical CPU. The order puts hardware threads of one physical core side by side."""

    package: int
    physical_core: int
    cpu: int


@dataclass(frozen=True)
class CpuShare:
    """What one engine process gets. ``cpus`` is empty where processes share cores and are not pinned."""

    num_threads: int
    cpus: tuple[int, ...]

    def environment(self) -> dict[str, str]:
        """Variables that the numerical libraries read when they load.

        Idle compute threads sleep instead of spinning: a core is often shared with the router or with the
        transfer library, and a spinning thread would keep them off it.
        """
        threads = str(self.num_threads)
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }


def plan_cpus(cores: Sequence[Core], num_processes: int, num_threads: int = 0) -> list[CpuShare]:
    """Divides ``cores`` among engine processes; one share per process, in order.

    ``num_threads`` of 0 means cores // processes, at least 1. Each process is pinned to cores of its own if
    there are enough for all of them; cores that are left over stay free for the router. Raises ValueError
    for fewer than one core or process.
    """
    if not cores or num_processes < 1:
        raise ValueError(f"cannot divide {len(cores)} cores among {num_processes} processes")
    if num_threads == 0:
        num_threads = max(1, len(cores) // num_processes)
    if num_threads * num_processes > len(cores):
        return [CpuShare(num_threads, ())] * num_processes
    ordered = [core.cpu for core in sorted(cores)]
    starts = range(0, num_threads * num_processes, num_threads)
    return [CpuShare(num_threads, tuple(ordered[start : start + num_threads])) for start in starts]


def available_cores() -> list[Core]:
    """The logical CPUs that this process may run on, with their place in the machine if the kernel tells."""
    if hasattr(os, "sched_getaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
    else:
        cpus = list(range(os.cpu_count() or 1))
    return [
        Core(_topology(cpu, "physical_package_id", 0), _topology(cpu, "core_id", cpu), cpu) for cpu in cpus
    ]


def _topology(cpu: int, name: str, default: int) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}").read_text())
    except (OSError, ValueError):
        return default
