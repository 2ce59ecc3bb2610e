"""When a process that died is started again, and when that is given up. Time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_DEATHS = 5
WINDOW_S = 60.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


@dataclass(frozen=True)
class Restart:
    """Start it again after ``delay_s`` seconds."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Do not start it again."""

    reason: str


@dataclass
class RestartPolicy:
    """The deaths of one process.

    The delay doubles with each death (0.5 s, 1 s, 2 s, … 30 s) and is back at 0.5 s after 60 s of being
    ready. Five deaths within 60 s, or five in a row without having been ready, end it.
    """

    _deaths: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DEATHS))  # seconds, monotonic
    _in_a_row: int = 0  # since the process last stayed ready for WINDOW_S
    _never_ready_in_a_row: int = 0

    def died(self, now: float, ready_since: float | None) -> Restart | GiveUp:
        """Counts a death at ``now``; ``ready_since`` is when this incarnation became ready, if it did."""
        if ready_since is not None:
            self._never_ready_in_a_row = 0
            if now - ready_since >= WINDOW_S:
                self._in_a_row = 0
        else:
            self._never_ready_in_a_row += 1
        self._in_a_row += 1
        self._deaths.append(now)
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] <= WINDOW_S:
            return GiveUp(f"it died {MAX_DEATHS} times within {WINDOW_S:.0f} s")
        if self._never_ready_in_a_row >= MAX_DEATHS:
            return GiveUp(f"it died {MAX_DEATHS} times in a row before it was ready")
        return Restart(min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._in_a_row - 1)))
