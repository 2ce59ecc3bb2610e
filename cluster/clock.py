"""Time as an argument: whoever needs it is handed a clock, so that tests and simulations can set it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tells the time. Durations come from ``monotonic``; ``unix`` is for what other machines read."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this process; never goes back."""
        ...

    def unix(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump when the machine's clock is set."""
        ...


class Timer(Protocol):
    """Something that will happen, unless it is cancelled."""

    def cancel(self) -> None:
        """Harmless if it has happened."""
        ...


StartTimer = Callable[[float, Callable[[], None]], Timer]  # (delay in s, function)


def call_later(delay_s: float, function: Callable[[], None]) -> Timer:
    """Run ``function`` in the running event loop after ``delay_s`` seconds."""
    return asyncio.get_running_loop().call_later(delay_s, function)


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    def unix(self) -> float:
        """See Clock."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to, for tests and virtual time. All arguments in seconds."""

    def __init__(self, *, monotonic: float = 0.0, unix: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._unix = unix

    def monotonic(self) -> float:
        """See Clock."""
        return self._monotonic

    def unix(self) -> float:
        """See Clock."""
        return self._unix

    def advance(self, seconds: float) -> None:
        """Moves both times on. Raises ValueError where ``seconds`` is negative or no finite number."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a clock advances by a finite number of seconds of at least 0, not {seconds}")
        self._monotonic += seconds
        self._unix += seconds
