"""What happens to a worker's requests, counted in its metrics."""

from __future__ import annotations

from cluster.messages import RequestTimings
from cluster.metrics import WorkerMetrics
from kv_transfer.handoff import Handoff


class MetricEvents:
    """See WorkerEvents."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def first_token(self, timings: RequestTimings) -> None:
        """See WorkerEvents."""
        self._metrics.observe_timings(timings)

    def failed(self, code: str) -> None:
        """See WorkerEvents."""
        self._metrics.request_failed(code)

    def handoff_ended(self, handoff: Handoff) -> None:
        """See WorkerEvents."""
        assert handoff.outcome is not None
        fence_s = handoff.changed_at - handoff.fenced_at if handoff.fenced_at else None
        self._metrics.handoff_ended(handoff.outcome.value, fence_s)

    def lease_expired(self) -> None:
        """See WorkerEvents."""
        self._metrics.lease_expired("handoff")

    def router_lost(self) -> None:
        """See WorkerEvents."""
        self._metrics.lease_expired("router")

    def corrupt(self) -> None:
        """See WorkerEvents."""
        self._metrics.checksum_mismatch()

    def dropped(self, reason: str) -> None:
        """See WorkerEvents."""
        self._metrics.message_dropped(reason)
