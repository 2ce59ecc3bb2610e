"""A worker's Prometheus metrics, all named ``leadout_worker_*``."""

from __future__ import annotations

from wsgiref.simple_server import WSGIServer

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from cluster.members import LoadReport, Role
from cluster.messages import RequestTimings

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.0, 5.0)
_WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_GAUGES = {
    "running": "Sequences in the running batch",
    "waiting": "Sequences queued for computation",
    "waiting_for_remote_kv": "Sequences whose prompt a prefill worker computes",
    "waiting_prefill_tokens": "Uncached prompt tokens still to compute",
    "kv_blocks_total": "KV blocks of this worker",
    "kv_blocks_free": "KV blocks that can be allocated, cached ones included",
    "kv_blocks_cached": "Free KV blocks that hold a reusable prefix",
    "kv_blocks_reserved": "KV blocks promised to a prefill worker that has not sealed yet",
    "kv_blocks_pinned": "KV blocks being sent to a decode worker",
    "kv_blocks_quarantined": "KV blocks of cancelled handoffs whose writer has not confirmed that it stopped",
    "handoffs_active": "Handoffs in the ledger",
}
_TOTALS = {
    "num_preemptions": ("preemptions", "Sequences preempted to free KV blocks"),
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens computed or found in the cache"),
    "generation_tokens_total": ("generation_tokens", "Tokens generated"),
}
_PHASES = ("queue", "prefill_queue", "prefill", "transfer", "activate")


class WorkerMetrics:
    """One set of metrics per worker process, in a registry of its own."""

    def __init__(self, role: Role) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "leadout_worker_"
        self._last = LoadReport()
        self._state = Gauge(prefix + "state", "1 for the current state", ["role", "state"], registry=registry)
        self._role = role
        self._gauges = {name: Gauge(prefix + name, text, registry=registry) for name, text in _GAUGES.items()}
        self._totals = {
            field: Counter(prefix + name, text, registry=registry) for field, (name, text) in _TOTALS.items()
        }
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
        self._transfer_busy = Counter(
            prefix + "transfer_busy_seconds", "Sum of the durations of KV writes", registry=registry
        )
        self._transfer_bytes = Counter(prefix + "transfer_bytes", "KV bytes handed over", registry=registry)
        self._transfer_descriptors = Counter(
            prefix + "transfer_descriptors", "Descriptors of KV writes, after merging", registry=registry
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
        self._server: WSGIServer | None = None

    def set_load(self, load: LoadReport) -> None:
        """Take over a load report."""
        for state in ("starting", "ready", "draining"):
            self._state.labels(self._role, state).set(load.state == state)
        for name, gauge in self._gauges.items():
            gauge.set(getattr(load, name))
        for name, counter in self._totals.items():
            counter.inc(max(0, getattr(load, name) - getattr(self._last, name)))
        self._last = msgspec.structs.replace(load)

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
            self._transfer_busy.inc(timings.transfer_busy_ms / 1000)
            self._transfer_bytes.inc(timings.transfer_bytes)
            self._transfer_descriptors.inc(timings.transfer_descriptors)
        for source, tokens in (
            ("computed", timings.num_computed_tokens),
            ("prefill_cache", timings.num_prefill_cached_tokens),
            ("decode_cache", timings.num_decode_cached_tokens),
        ):
            self._prompt_tokens_by_source.labels(source).inc(tokens)

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
