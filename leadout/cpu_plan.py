"""How many threads each engine process of this machine computes with."""

from __future__ import annotations

import os


def threads_per_process(num_cores: int, num_processes: int) -> int:
    """Cores divided among engine processes; at least 1. Raises ValueError for fewer than one of either.

    More compute threads than cores is far slower than fewer: every parallel region then waits for a thread
    that the kernel has put aside.
    """
    if num_cores < 1 or num_processes < 1:
        raise ValueError(f"cannot divide {num_cores} cores among {num_processes} processes")
    return max(1, num_cores // num_processes)


def available_cores() -> int:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables that the numerical libraries read when they load.

    Idle compute threads sleep instead of spinning: a core is often shared with the router or with the
    transfer library, and a spinning thread would keep them off it.
    """
    threads = str(num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
