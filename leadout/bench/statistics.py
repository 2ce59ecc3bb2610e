"""Latency and throughput figures from the records of a run. Definitions: docs/benchmarking.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from leadout.bench.client import RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one latency, in ms. All 0 without samples."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Limits a request must keep to count as good, in ms; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One run's figures."""

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    duration_s: float
    ttft_ms: Distribution  # sent until the first text arrived
    itl_ms: Distribution  # gaps between arrivals of text
    tpot_ms: Distribution  # (last text − first text) / (tokens − 1), per request
    e2e_ms: Distribution  # sent until the last text arrived
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float  # of the prompt tokens
    good_requests_per_s: float | None  # None: no limits were given
    server_ms: dict[str, float]  # medians of what a Leadout server reported per request
    number_formats: tuple[str, ...] = ()  # of a Leadout server's workers, with their kernels

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return asdict(self)


def summarise(records: Sequence[RequestRecord], duration_s: float, goodput: Goodput | None) -> BenchResult:
    """The figures of a run that took ``duration_s`` seconds."""
    good = [record for record in records if not record.error]
    prompt_tokens = sum(record.prompt_tokens for record in good)
    is_good = None if goodput is None else sum(_keeps(record, goodput) for record in good)
    return BenchResult(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error)),
        duration_s=duration_s,
        ttft_ms=distribution([ttft_ms(record) for record in good]),
        itl_ms=distribution(
            [(after - before) * 1000 for record in good for before, after in pairwise(record.token_times)]
        ),
        tpot_ms=distribution([tpot for record in good if (tpot := tpot_ms(record)) is not None]),
        e2e_ms=distribution([e2e_ms(record) for record in good]),
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        input_tokens_per_s=prompt_tokens / duration_s if duration_s else 0.0,
        output_tokens_per_s=sum(record.completion_tokens for record in good) / duration_s
        if duration_s
        else 0.0,
        cached_share=sum(record.cached_tokens for record in good) / prompt_tokens if prompt_tokens else 0.0,
        good_requests_per_s=None if is_good is None else is_good / duration_s if duration_s else 0.0,
        server_ms=_server_medians(good),
    )


def ttft_ms(record: RequestRecord) -> float:
    """Time to first token."""
    return (record.token_times[0] - record.sent_at) * 1000


def e2e_ms(record: RequestRecord) -> float:
    """Time to the last token."""
    return (record.ended_at - record.sent_at) * 1000


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first; None for an answer of one token."""
    if record.completion_tokens < 2:
        return None
    return (record.ended_at - record.token_times[0]) * 1000 / (record.completion_tokens - 1)


def distribution(samples: Sequence[float]) -> Distribution:
    """Percentiles by linear interpolation between the closest ranks."""
    if not samples:
        return Distribution()
    ordered = sorted(samples)
    return Distribution(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted samples, at least one."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _keeps(record: RequestRecord, goodput: Goodput) -> bool:
    tpot = tpot_ms(record)
    return (
        (goodput.ttft_ms is None or ttft_ms(record) <= goodput.ttft_ms)
        and (goodput.tpot_ms is None or tpot is None or tpot <= goodput.tpot_ms)
        and (goodput.e2e_ms is None or e2e_ms(record) <= goodput.e2e_ms)
    )


def _server_medians(records: Sequence[RequestRecord]) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for record in records:
        for name, value in (record.server_timings or {}).items():
            if isinstance(value, int | float):
                samples.setdefault(name, []).append(float(value))
    return {name: percentile(sorted(values), 50) for name, values in samples.items()}
