"""How many threads one engine process computes with."""

from __future__ import annotations

import contextlib
import os

import torch


def threads_per_process(num_engine_processes: int) -> int:
    """Cores of this machine that this process may run on, divided among engine processes; at least 1.

    More compute threads than cores is far slower than fewer: every parallel region then waits for a thread
    that the kernel has put aside.
    """
    if num_engine_processes < 1:
        raise ValueError(f"num_engine_processes is {num_engine_processes}; it must be at least 1")
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, num_cores // num_engine_processes)


def configure_threads(num_threads: int) -> None:
    """Sets this process's compute threads. Call it before any tensor work: pools are sized at first use."""
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    torch.set_num_threads(num_threads)
    with contextlib.suppress(RuntimeError):  # the inter-op pool has started; nothing here uses it
        torch.set_num_interop_threads(1)
