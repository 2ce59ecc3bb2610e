"""One log line per request that was answered with an error, and never more than a bounded number of lines."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass

from cluster.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

_FIELD_PATH = re.compile(r"\w+(?:\.\w+|\[\d+\])*", re.ASCII)
_MAX_TEXT = 128  # characters of anything that a client chose


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """What is said of one refused request: never a value of its fields, so never the prompt."""

    request_id: str
    client: str  # address and port
    route: str  # the route's template where one matched, else method and path as they came
    status: int
    code: str | None = None
    param: str | None = None


class RejectionLog:
    """Writes at most ``max_lines`` in each ``window_s`` seconds, and then how many it left out.

    Needs a running event loop, which says the number at the window's end where nothing further comes.
    """

    def __init__(self, *, max_lines: int = 50, window_s: float = 10.0, clock: Clock | None = None) -> None:
        """``clock`` is the system's unless another is given."""
        self._max_lines = max_lines
        self._window_s = window_s
        self._clock = clock or SystemClock()
        self._window_end = 0.0
        self._num_lines = 0
        self._num_suppressed = 0

    def add(self, rejection: Rejection) -> None:
        """Log one, or count it as left out."""
        now = self._clock.monotonic()
        if now >= self._window_end:
            self._say_suppressed()
            self._window_end = now + self._window_s
            self._num_lines = 0
        if self._num_lines < self._max_lines:
            self._num_lines += 1
            logger.log(
                logging.WARNING if rejection.status >= 500 else logging.INFO,
                "request refused",
                extra={
                    "request_id": plain(rejection.request_id),
                    "client": plain(rejection.client),
                    "route": plain(rejection.route),
                    "status": rejection.status,
                    "code": plain(rejection.code or "-"),
                    "param": _field_path(rejection.param),
                },
            )
            return
        if self._num_suppressed == 0:
            asyncio.get_running_loop().call_later(self._window_end - now, self._say_suppressed)
        self._num_suppressed += 1

    def _say_suppressed(self) -> None:
        if self._num_suppressed:
            logger.warning(
                "%d more refused requests were not logged: at most %d lines in %g s",
                self._num_suppressed,
                self._max_lines,
                self._window_s,
            )
            self._num_suppressed = 0


def plain(text: str) -> str:
    """``text`` as one word of printable ASCII, cut off: it cannot pass for another line or field."""
    word = (
        text[:_MAX_TEXT].encode("unicode_escape").decode("ascii").replace(" ", "\\x20").replace("=", "\\x3d")
    )
    return word + "…" if len(text) > _MAX_TEXT else word


def address_text(address: tuple[str, int] | None) -> str:
    """``host:port`` of a client; "-" where it has none."""
    if address is None:
        return "-"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _field_path(param: str | None) -> str:
    """The path as far as it consists of plain names: a key of a free-form object may be anything."""
    match = _FIELD_PATH.match(param or "")
    return "-" if match is None else plain(match[0])
