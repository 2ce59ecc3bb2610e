"""Signals that reach an asyncio loop however busy it is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from types import FrameType


def on_signal(number: signal.Signals, callback: Callable[[], None]) -> None:
    """Run ``callback`` in the running loop when the signal comes. Only in the main thread.

    Unlike ``add_signal_handler`` of asyncio, which reads signals from the pipe that other threads wake the
    loop by: a loop that is behind by some hundred calls of other threads never hears of them.
    """
    loop = asyncio.get_running_loop()

    def handle(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(callback)

    signal.signal(number, handle)
