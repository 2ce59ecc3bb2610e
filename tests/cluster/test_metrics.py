"""A worker's metrics as Prometheus reads them."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import generate_latest

from cluster.members import LoadReport
from cluster.messages import RequestTimings
from cluster.metrics import WorkerMetrics


def text(metrics: WorkerMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_load_reports_become_gauges_and_counters() -> None:
    metrics = WorkerMetrics("decode")
    metrics.set_load(
        LoadReport(state="ready", running=3, kv_blocks_quarantined=2, generation_tokens_total=10)
    )
    metrics.set_load(LoadReport(state="draining", running=1, generation_tokens_total=25))
    shown = text(metrics)
    assert "leadout_worker_running 1.0" in shown
    assert "leadout_worker_kv_blocks_quarantined 0.0" in shown
    assert "leadout_worker_generation_tokens_total 25.0" in shown
    assert 'leadout_worker_state{role="decode",state="draining"} 1.0' in shown
    assert 'leadout_worker_state{role="decode",state="ready"} 0.0' in shown


def test_timings_of_a_handed_over_prompt() -> None:
    metrics = WorkerMetrics("decode")
    metrics.observe_timings(
        RequestTimings(
            prefill_ms=120.0,
            transfer_ms=3.0,
            transfer_busy_ms=9.0,
            transfer_bytes=4096,
            transfer_descriptors=2,
            num_computed_tokens=40,
            num_prefill_cached_tokens=16,
            prefill_worker="prefill-0",
        )
    )
    shown = text(metrics)
    assert 'leadout_worker_handoffs_total{prefill_worker="prefill-0"} 1.0' in shown
    assert "leadout_worker_transfer_bytes_total 4096.0" in shown
    assert 'leadout_worker_prompt_tokens_by_source_total{source="prefill_cache"} 16.0' in shown
    assert 'leadout_worker_request_phase_seconds_sum{phase="prefill"} 0.12' in shown


def test_a_prompt_computed_here_is_no_handoff() -> None:
    metrics = WorkerMetrics("decode")
    metrics.observe_timings(RequestTimings(num_computed_tokens=5))
    assert "leadout_worker_handoffs_total{" not in text(metrics)


def test_the_endpoint() -> None:
    metrics = WorkerMetrics("prefill")
    assert metrics.serve("127.0.0.1", -1) == ""
    url = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(url) as response:
        assert b"leadout_worker_kv_blocks_free" in response.read()
    metrics.close()
    metrics.close()
    with pytest.raises(OSError, match=r"refused|closed|urlopen"):
        urllib.request.urlopen(url, timeout=1)
