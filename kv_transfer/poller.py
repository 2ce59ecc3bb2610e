"""The one thread that drives a transport: runs its commands, polls its agent, and sleeps in between."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MIN_SLEEP_S = 0.0001
_SLEEP_SHARE = 1 / 20  # of the time since the last activity: what sleeping adds to a wait stays below 5 %


def polling_sleep_s(idle_s: float, longest_s: float) -> float:
    """How long to sleep before the next poll, ``idle_s`` seconds after something last happened.

    Short right after activity, then growing in proportion to the time waited, up to ``longest_s``.
    """
    return min(max(idle_s * _SLEEP_SHARE, _MIN_SLEEP_S), longest_s)


class Poller:
    """A thread that owns everything its commands and its ``poll`` function touch.

    ``poll`` runs after each batch of commands and after each sleep. It returns the seconds to sleep until the
    next poll, or None to sleep until a command comes. If it or a command raises, the poller stops and calls
    ``on_crash`` with the exception, still on its own thread; commands already queued run after that.
    ``on_stop`` is the last that runs on the thread.
    """

    def __init__(
        self,
        name: str,
        *,
        poll: Callable[[], float | None],
        on_stop: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._poll = poll
        self._on_stop = on_stop
        self._on_crash = on_crash
        self._wake_up = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Called once. It is stopped when the interpreter exits, if not before."""
        # A daemon thread that the interpreter ends inside native code takes the process down with SIGABRT.
        atexit.register(self.stop)
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> bool:
        """Queue ``command`` for the thread and wake it. False if the poller has stopped: it will not run."""
        with self._wake_up:
            if self._stopping:
                return False
            self._commands.append(command)
            self._wake_up.notify()
        return True

    def stop(self) -> None:
        """Run the commands already queued, then ``on_stop``; return when the thread has ended. Idempotent."""
        with self._wake_up:
            self._stopping = True
            self._wake_up.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the poller %s failed", self._thread.name)
            with self._wake_up:
                self._stopping = True
            self._on_crash(error)
            while (command := self._next_command()) is not None:
                command()
        self._on_stop()

    def _loop(self) -> None:
        sleep_s: float | None = 0.0
        while True:
            with self._wake_up:
                if not self._commands and not self._stopping and (sleep_s is None or sleep_s > 0):
                    self._wake_up.wait(sleep_s)
            while (command := self._next_command()) is not None:
                command()
            if self._stopping and not self._commands:  # no command can be added any more
                return
            sleep_s = self._poll()

    def _next_command(self) -> Callable[[], None] | None:
        with self._wake_up:
            return self._commands.popleft() if self._commands else None
