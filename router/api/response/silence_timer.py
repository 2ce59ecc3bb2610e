"""Notices that nothing has been sent for a while."""

from __future__ import annotations

from collections.abc import Callable

from cluster.clock import Clock, StartTimer, SystemClock, Timer, call_later


class SilenceTimer:
    """Calls ``on_silence`` whenever ``interval_s`` seconds pass without a ``restart``, until it is closed.

    A restart only notes the time, so that it costs nothing where it is called for each token.
    """

    def __init__(
        self,
        interval_s: float,
        on_silence: Callable[[], None],
        *,
        clock: Clock | None = None,
        timer: StartTimer = call_later,
    ) -> None:
        """Begins at once. An interval of 0: never. ``clock`` is the system's unless another is given."""
        self._interval_s = interval_s
        self._on_silence = on_silence
        self._clock = clock or SystemClock()
        self._start_timer = timer
        self._silent_since = self._clock.monotonic()
        self._timer: Timer | None = timer(interval_s, self._look) if interval_s > 0 else None

    def restart(self) -> None:
        """Something was sent."""
        self._silent_since = self._clock.monotonic()

    def close(self) -> None:
        """No more calls. Harmless if closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        rest_s = self._silent_since + self._interval_s - self._clock.monotonic()
        if rest_s <= 0:
            self._silent_since = self._clock.monotonic()
            rest_s = self._interval_s
            self._timer = self._start_timer(rest_s, self._look)
            self._on_silence()  # last, because it may close this
        else:
            self._timer = self._start_timer(rest_s, self._look)
