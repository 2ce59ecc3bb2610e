"""A worker's Prometheus metrics, all named ``leadout_worker_*``."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from cluster.load import LoadReport
from cluster.members import Role, takes_prefills, takes_requests
from cluster.messages import RequestTimings

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.0, 5.0)
_WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_GAUGES = {
    "running": ("queue.running", "Sequences in the running batch"),
    "waiting": ("queue.waiting", "Sequences queued for computation"),
    "waiting_for_remote_kv": (
        "queue.waiting_for_remote_kv",
        "Sequences whose prompt a prefill worker computes",
    ),
    "waiting_prefill_tokens": ("queue.waiting_prefill_tokens", "Uncached prompt tokens still to compute"),
    "kv_blocks_total": ("kv.blocks_total", "KV blocks of this worker"),
    "kv_blocks_free": ("kv.blocks_free", "KV blocks that can be allocated, cached ones included"),
    "kv_blocks_cached": ("kv.blocks_cached", "Free KV blocks that hold a reusable prefix"),
    "kv_blocks_reserved": (
        "kv.blocks_reserved",
        "KV blocks promised to a prefill worker that has not sealed yet",
    ),
    "kv_blocks_pinned": ("kv.blocks_pinned", "KV blocks being sent to a decode worker"),
    "kv_blocks_quarantined": (
        "kv.blocks_quarantined",
        "KV blocks of cancelled handoffs whose writer has not confirmed that it stopped",
    ),
}
_COUNTERS = {
    "preemptions": ("queue.preemptions_total", "Sequences preempted to free KV blocks"),
    "prompt_tokens": ("steps.prompt_tokens_total", "Prompt tokens computed or found in the cache"),
    "generation_tokens": ("steps.generation_tokens_total", "Tokens generated"),
    "prefix_cache_queries": (
        "kv.prefix_queries_total",
        "Tokens looked up in the prefix cache, when a request was first admitted",
    ),
    "prefix_cache_hits": (
        "kv.prefix_hits_total",
        "Tokens found in the prefix cache; divided by the queries this is its hit rate",
    ),
    "transfer_writes": ("transfers.writes_total", "KV writes into peers' caches that have landed"),
    "transfer_writes_failed": ("transfers.writes_failed_total", "KV writes that failed or ran out of time"),
    "transfer_bytes": ("transfers.bytes_total", "Bytes of KV writes that have landed"),
    "transfer_descriptors": (
        "transfers.descriptors_total",
        "NIXL descriptors of KV writes that have landed, after merging",
    ),
    "transfer_busy_seconds": (
        "transfers.write_seconds_total",
        "Sum of the durations of KV writes that have landed, overlapped ones included",
    ),
    "transfer_notifications_sent": ("transfers.notifications_sent_total", "NIXL notifications sent to peers"),
    "transfer_notifications_received": (
        "transfers.notifications_received_total",
        "NIXL notifications received from peers",
    ),
    "transfer_notifications_dropped": (
        "transfers.notifications_dropped_total",
        "NIXL notifications received from agents that are no current peers",
    ),
    "transfer_peers_added": ("transfers.peers_added_total", "Peers connected to, again after a failure too"),
    "transfer_peers_failed": (
        "transfers.peers_failed_total",
        "Peers dropped because a write or notification to them failed",
    ),
    "transfer_polls": (
        "transfers.polls_total",
        "Polls of the NIXL agent: ten per second while nothing happens, 500 while KV is expected",
    ),
}
_BYTES_BUCKETS = tuple(float(4**exponent) for exponent in range(7, 18))  # 16 KiB to 16 GiB
_DESCRIPTOR_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
_GBPS_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
HANDOFF_STATES = ("reserved", "streaming", "sealed", "active", "fencing")
_PHASES = ("queue", "prefill_queue", "prefill", "transfer", "activate")


class WorkerMetrics:
    """One set of metrics per worker process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "leadout_worker_"
        self._last = LoadReport()
        self._state = Gauge(prefix + "state", "1 for the current state", ["state"], registry=registry)
        self._role = Gauge(prefix + "role", "1 for what new work it takes", ["takes"], registry=registry)
        self._gauges = [
            (attrgetter(field), Gauge(prefix + name, text, registry=registry))
            for name, (field, text) in _GAUGES.items()
        ]
        self._counters = [
            (attrgetter(field), Counter(prefix + name, text, registry=registry))
            for name, (field, text) in _COUNTERS.items()
        ]
        self._step = Histogram(
            prefix + "step_seconds", "Duration of an engine step", buckets=_STEP_BUCKETS, registry=registry
        )
        self._step_tokens = Counter(prefix + "step_tokens", "Tokens computed in steps", registry=registry)
        self._phase = Histogram(
            prefix + "request_phase_seconds",
            "Parts of the time to first token: decode-side queue, prefill-side queue, prefill, what the KV "
            "transfer added, and activation",
            ["phase"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self._transfer_bytes = Histogram(
            prefix + "handoff_bytes", "KV bytes of a handoff", buckets=_BYTES_BUCKETS, registry=registry
        )
        self._transfer_descriptors = Histogram(
            prefix + "handoff_descriptors",
            "Descriptors of a handoff's writes, after merging",
            buckets=_DESCRIPTOR_BUCKETS,
            registry=registry,
        )
        self._transfer_gbps = Histogram(
            prefix + "handoff_gbps",
            "Throughput of a handoff's writes in GB/s (10^9 bytes)",
            buckets=_GBPS_BUCKETS,
            registry=registry,
        )
        self._link_gbps = Gauge(
            prefix + "link_gbps",
            "Throughput into a peer's KV cache in GB/s: measured when connected (probe), and a moving "
            "average over large writes since (writes). Far less than the probe: a slow path is used",
            ["peer", "measured"],
            registry=registry,
        )
        self._live_handoffs = Gauge(
            prefix + "live_handoffs", "Handoffs in the ledger by state", ["state"], registry=registry
        )
        self._handoffs_ended = Counter(
            prefix + "handoffs_ended",
            "Handoffs by how they ended: completed, fenced (the writer confirmed that it has stopped), or "
            "writer_gone (it is dead and its agent removed)",
            ["outcome"],
            registry=registry,
        )
        self._fence_time = Histogram(
            prefix + "handoff_fence_seconds",
            "From calling a handoff off until its writer was known to have stopped",
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self._lease_expiries = Counter(
            prefix + "lease_expiries",
            "Leases that ended because a peer was silent: a handoff's, or a router's",
            ["lease"],
            registry=registry,
        )
        self._checksum_mismatches = Counter(
            prefix + "checksum_mismatches",
            "Handoffs in which a KV block was not what had been sent; the prompt was computed again",
            registry=registry,
        )
        self._dropped = Counter(
            prefix + "dropped_messages",
            "Messages dropped: malformed, undeliverable, unexpected, come twice, of an older incarnation or "
            "attempt, or of what is over",
            ["reason"],
            registry=registry,
        )
        self._handoffs = Counter(
            prefix + "handoffs",
            "Prompts handed over, by prefill worker",
            ["prefill_worker"],
            registry=registry,
        )
        self._prompt_tokens_by_source = Counter(
            prefix + "prompt_tokens_by_source",
            "Prompt tokens by origin: computed, the prefill worker's cache, or the decode worker's",
            ["source"],
            registry=registry,
        )
        self._failures = Counter(
            prefix + "request_failures", "Requests that ended with an error", ["code"], registry=registry
        )
        for lease in ("handoff", "router"):
            self._lease_expiries.labels(lease)
        for outcome in ("completed", "fenced", "writer_gone"):
            self._handoffs_ended.labels(outcome)
        self._num_dropped: dict[str, int] = {}
        self._server: WSGIServer | None = None

    def set_load(self, load: LoadReport) -> None:
        """Take over a load report."""
        for state in ("starting", "ready", "draining"):
            self._state.labels(state).set(load.state == state)
        for value_of, gauge in self._gauges:
            gauge.set(value_of(load))
        for value_of, counter in self._counters:
            counter.inc(max(0, value_of(load) - value_of(self._last)))
        for state in HANDOFF_STATES:
            self._live_handoffs.labels(state).set(load.handoffs.get(state, 0))
        for gone in {link.peer for link in self._last.links} - {link.peer for link in load.links}:
            for measured in ("probe", "writes"):
                self._link_gbps.remove(gone, measured)
        for link in load.links:
            self._link_gbps.labels(link.peer, "probe").set(link.probe_gbps)
            self._link_gbps.labels(link.peer, "writes").set(link.gbps)
        self._last = load

    def set_role(self, role: Role) -> None:
        """What the worker advertises now."""
        self._role.labels("requests").set(takes_requests(role))
        self._role.labels("prefills").set(takes_prefills(role))

    def set_dropped(self, totals: Mapping[str, int]) -> None:
        """Take over the numbers of dropped messages since the start, by reason."""
        for reason, total in totals.items():
            self._dropped.labels(reason).inc(max(0, total - self._num_dropped.get(reason, 0)))
        self._num_dropped = dict(totals)

    def message_dropped(self, reason: str) -> None:
        """A role ignored a message."""
        self._dropped.labels(reason).inc()

    def observe_step(self, duration_ms: float, num_tokens: int) -> None:
        """One engine step."""
        self._step.observe(duration_ms / 1000)
        self._step_tokens.inc(num_tokens)

    def observe_timings(self, timings: RequestTimings) -> None:
        """One prompt is done: its first token is out, or (prefill worker) it is sealed."""
        for phase in _PHASES:
            self._phase.labels(phase).observe(getattr(timings, f"{phase}_ms") / 1000)
        if timings.prefill_worker:
            self._handoffs.labels(timings.prefill_worker).inc()
            if timings.transfer_bytes:
                self._transfer_bytes.observe(timings.transfer_bytes)
                self._transfer_descriptors.observe(timings.transfer_descriptors)
                self._transfer_gbps.observe(
                    timings.transfer_bytes / max(timings.transfer_busy_ms, 1e-3) / 1e6
                )
        for source, tokens in (
            ("computed", timings.num_computed_tokens),
            ("prefill_cache", timings.num_prefill_cached_tokens),
            ("decode_cache", timings.num_decode_cached_tokens),
        ):
            self._prompt_tokens_by_source.labels(source).inc(tokens)

    def handoff_ended(self, outcome: str, fence_s: float | None) -> None:
        """A handoff left the ledger; ``fence_s`` unless it was never called off."""
        self._handoffs_ended.labels(outcome).inc()
        if fence_s is not None:
            self._fence_time.observe(fence_s)

    def lease_expired(self, lease: str) -> None:
        """A ``router``, or the worker that was to fill a ``handoff``, was silent for too long."""
        self._lease_expiries.labels(lease).inc()

    def checksum_mismatch(self) -> None:
        """A handoff brought other bytes than were sent."""
        self._checksum_mismatches.inc()

    def request_failed(self, code: str) -> None:
        """A request ended with an error of this code."""
        self._failures.labels(code).inc()

    def serve(self, host: str, port: int) -> str:
        """Answer Prometheus at ``/metrics``; returns the URL. Port 0: any free port; -1: no endpoint, "".

        Raises OSError if the port cannot be bound.
        """
        if port < 0:
            return ""
        self._server, _thread = start_http_server(port, addr=host, registry=self.registry)
        return f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop answering. Harmless if ``serve`` was not called."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
