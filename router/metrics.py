"""The router's Prometheus metrics, all named ``leadout_router_*``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.policy.plan import Plan

_LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0,
)  # fmt: skip
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.0, 5.0)


class RouterMetrics:
    """One set of metrics per router, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "leadout_router_"
        self.requests = Counter(
            prefix + "requests_total", "API requests by outcome", ["endpoint", "status"], registry=registry
        )
        self.time_to_first_token = Histogram(
            prefix + "time_to_first_token_seconds",
            "From the request's receipt to its first token",
            ["endpoint"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            prefix + "inter_token_latency_seconds",
            "Gap between two tokens of one sequence, as received from the worker",
            ["endpoint"],
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.e2e_request_latency = Histogram(
            prefix + "e2e_request_latency_seconds",
            "From the request's receipt to its last token",
            ["endpoint"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.tokenize_time = Histogram(
            prefix + "request_preprocess_time_seconds",
            "Validation, chat template and tokenization of one request",
            ["endpoint"],
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.request_queue_time = Histogram(
            prefix + "request_queue_time_seconds",
            "Wait on the decode worker for KV blocks or for the first schedule, as it reported",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.request_prefill_time = Histogram(
            prefix + "request_prefill_time_seconds",
            "Prefill of the prompt, as the worker reported, by where it ran",
            ["where"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.request_transfer_time = Histogram(
            prefix + "request_kv_transfer_time_seconds",
            "What the KV transfer added to the time to first token, as the workers reported",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            prefix + "prompt_tokens_total", "Prompt tokens of dispatched sequences", registry=registry
        )
        self.generation_tokens = Counter(
            prefix + "generation_tokens_total", "Tokens received from workers", registry=registry
        )
        self.cached_tokens = Counter(
            prefix + "cached_tokens_total", "Prompt tokens that came from a prefix cache", registry=registry
        )
        self.in_flight = Gauge(prefix + "in_flight", "Sequences on workers", registry=registry)
        self.connections = Gauge(prefix + "workers", "Workers known", ["role"], registry=registry)
        self.plans = Counter(
            prefix + "plan_decisions_total", "Where prompts were sent", ["decision"], registry=registry
        )
        self.dropped = Counter(
            prefix + "dropped_messages_total", "Messages from workers ignored", ["reason"], registry=registry
        )
        self.redispatches = Counter(
            prefix + "redispatches_total",
            "Further attempts by cause and kind: a retry starts over, a migration goes on after tokens",
            ["reason", "kind"],
            registry=registry,
        )
        self.recovery_time = Histogram(
            prefix + "recovery_seconds",
            "From the loss of a sequence's worker to its next token, by cause",
            ["reason"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.cancels = Counter(
            prefix + "cancels_total", "Sequences cancelled on workers", ["reason"], registry=registry
        )
        self.refused = Counter(
            prefix + "admission_refused_total", "Requests refused because full", registry=registry
        )
        self.requests_waiting = Gauge(
            prefix + "requests_waiting", "Requests that wait for places", registry=registry
        )
        self.request_wait_time = Histogram(
            prefix + "request_wait_time_seconds",
            "How long a request waited in the router for places",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.bodies_waiting = Gauge(
            prefix + "bodies_waiting", "Request bodies that wait for a process", registry=registry
        )
        self.bodies_in_work = Gauge(
            prefix + "bodies_in_work", "Request bodies being parsed and tokenized", registry=registry
        )
        self.body_processes_ended = Counter(
            prefix + "body_processes_ended_total",
            "Processes for request bodies that ended, for whatever reason",
            registry=registry,
        )
        self.http_connections = Gauge(
            prefix + "http_connections", "Open connections of clients", registry=registry
        )
        self.http_refused = Counter(
            prefix + "http_refused_total",
            "What was refused before it was a request: connections, headers, what is no HTTP",
            ["code"],
            registry=registry,
        )
        self.kv_index_size = Gauge(
            prefix + "kv_index_size", "Distinct KV blocks in the index", registry=registry
        )
        self.kv_index_evictions = Gauge(
            prefix + "kv_index_evictions", "Blocks forgotten because the index was full", registry=registry
        )
        for decision in ("local", "remote"):
            self.plans.labels(decision)

    def planned(self, plan: Plan) -> None:
        """Count a plan that was sent."""
        self.plans.labels(plan.decision).inc()

    def message_dropped(self, reason: str) -> None:
        """Count a message that was ignored."""
        self.dropped.labels(reason).inc()

    def redispatched(self, reason: str, *, is_migration: bool) -> None:
        """Count a further attempt."""
        self.redispatches.labels(reason, "migration" if is_migration else "retry").inc()

    def recovered(self, reason: str, duration_s: float) -> None:
        """A sequence that had lost its worker has tokens again."""
        self.recovery_time.labels(reason).observe(duration_s)

    def cancelled(self, reason: str) -> None:
        """Count a cancel that was sent."""
        self.cancels.labels(reason).inc()

    def expose(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
