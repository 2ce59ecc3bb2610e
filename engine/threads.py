"""How many threads one engine process computes with."""

from __future__ import annotations

import contextlib

import torch


def configure_threads(num_threads: int) -> None:
    """Sets this process's compute threads. Call it before any tensor work: pools are sized at first use."""
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    torch.set_num_threads(num_threads)
    with contextlib.suppress(RuntimeError):  # the inter-op pool has started; nothing here uses it
        torch.set_num_interop_threads(1)
