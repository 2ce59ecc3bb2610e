"""Says a lasting problem once, then ever more rarely how often it came back, and once when it is over."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from cluster.clock import Clock, SystemClock

FIRST_INTERVAL_S = 10.0
LONGEST_INTERVAL_S = 600.0
_MAX_PROBLEMS = 1000  # remembered at once; the one that was not heard of for longest is forgotten


@dataclass(slots=True)
class _Problem:
    began_at: float  # monotonic seconds
    last_line_at: float
    interval_s: float = 0.0  # from the last line to the next
    num_reports: int = 0
    num_unsaid: int = 0  # of them since the last line
    is_over: bool = False
    is_said: bool = False  # since it began, or came back


class ProblemLog:
    """For what is logged in a loop or for each message: a state that lasts must not fill the disk.

    A problem is known by its key. Its first report is a line. Later ones are counted, and the next lines come
    after 10 s, 20 s, 40 s … and at last each 10 minutes, if there was a report since. That it is over is a
    line as well, if its beginning was one. What comes and goes is one problem. It is a new one, which is said
    at once, after an interval without a report. Not thread-safe.
    """

    def __init__(self, logger: logging.Logger, clock: Clock | None = None) -> None:
        """Writes to ``logger``. ``clock`` is the system's unless another is given."""
        self._logger = logger
        self._clock: Clock = clock or SystemClock()
        self._problems: dict[Hashable, _Problem] = {}  # the latest heard of last

    def report(
        self,
        key: Hashable,
        message: str,
        *args: object,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """The problem exists, or has happened again. The traceback of ``error`` goes with the line."""
        now = self._clock.monotonic()
        problem = self._problems.pop(key, None)
        if problem is None or (not problem.num_unsaid and now >= problem.last_line_at + problem.interval_s):
            problem = _Problem(began_at=now, last_line_at=now)
        self._problems[key] = problem
        if len(self._problems) > _MAX_PROBLEMS:
            del self._problems[next(iter(self._problems))]
        if problem.is_over:
            problem.is_over = problem.is_said = False
        problem.num_reports += 1
        if now < problem.last_line_at + problem.interval_s:
            problem.num_unsaid += 1
            return
        if problem.num_unsaid:
            message += " (%d more in %.0f s)"
            args = (*args, problem.num_unsaid, now - problem.last_line_at)
        self._logger.log(level, message, *args, exc_info=error)
        problem.interval_s = min(LONGEST_INTERVAL_S, problem.interval_s * 2 or FIRST_INTERVAL_S)
        problem.last_line_at, problem.num_unsaid, problem.is_said = now, 0, True

    def over(self, key: Hashable, message: str, *args: object) -> None:
        """The problem does not exist any more. Says nothing where it did not exist."""
        problem = self._problems.get(key)
        if problem is None or problem.is_over:
            return
        problem.is_over = True
        if problem.is_said:
            message += " (%d reports in %.0f s)"
            lasted_s = self._clock.monotonic() - problem.began_at
            self._logger.info(message, *args, problem.num_reports, lasted_s)
