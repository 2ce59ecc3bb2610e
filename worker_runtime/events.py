"""What a worker's roles report about their requests."""

from __future__ import annotations

from typing import Protocol

from cluster.messages import RequestTimings
from kv_transfer.handoff import Handoff


class WorkerEvents(Protocol):
    """What happens to requests and handoffs, for metrics. Called in the worker's event loop."""

    def first_token(self, timings: RequestTimings) -> None:
        """A prompt is done: its first token is out (decode) or sealed (prefill)."""
        ...

    def failed(self, code: str) -> None:
        """A request ended with an error of this code."""
        ...

    def handoff_ended(self, handoff: Handoff) -> None:
        """A handoff was released; its ``outcome`` is set."""
        ...

    def lease_expired(self) -> None:
        """A prefill worker was not heard of for a lease."""
        ...

    def router_lost(self) -> None:
        """A router was not heard of for a lease."""
        ...

    def corrupt(self) -> None:
        """A handoff brought blocks that are not what was sent."""
        ...

    def dropped(self, reason: str) -> None:
        """A message was ignored: it came late, twice, or astray."""
        ...
