"""A worker's metrics as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest

from cluster.load import KvLoad, LinkReport, LoadReport, QueueLoad, StepLoad, TransferCounters
from cluster.messages import RequestTimings
from cluster.metrics import HANDOFF_STATES, WorkerMetrics
from kv_transfer.handoff import HandoffOutcome, HandoffState


def text(metrics: WorkerMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def value_of(metrics: WorkerMetrics) -> Callable[..., float | None]:
    """``value_of(metrics)("step_seconds_sum", label="x")``; None where there is no such line."""
    return lambda name, **labels: metrics.registry.get_sample_value(f"leadout_worker_{name}", labels)


def test_load_reports_become_gauges_and_counters() -> None:
    metrics = WorkerMetrics()
    metrics.set_load(
        LoadReport(
            state="ready",
            queue=QueueLoad(running=3),
            kv=KvLoad(blocks_quarantined=2, prefix_queries_total=100, prefix_hits_total=30),
            steps=StepLoad(generation_tokens_total=10),
        )
    )
    metrics.set_load(
        LoadReport(
            state="draining",
            queue=QueueLoad(running=1),
            kv=KvLoad(prefix_queries_total=160, prefix_hits_total=48),
            steps=StepLoad(generation_tokens_total=25),
            transfers=TransferCounters(writes_failed_total=2, write_seconds_total=0.5),
        )
    )
    shown = text(metrics)
    assert "leadout_worker_running 1.0" in shown
    assert "leadout_worker_kv_blocks_quarantined 0.0" in shown
    assert "leadout_worker_generation_tokens_total 25.0" in shown
    assert "leadout_worker_prefix_cache_queries_total 160.0" in shown
    assert "leadout_worker_prefix_cache_hits_total 48.0" in shown
    assert "leadout_worker_transfer_writes_failed_total 2.0" in shown
    assert "leadout_worker_transfer_busy_seconds_total 0.5" in shown
    assert 'leadout_worker_state{state="draining"} 1.0' in shown
    assert 'leadout_worker_state{state="ready"} 0.0' in shown


def test_timings_of_a_handed_over_prompt() -> None:
    metrics = WorkerMetrics()
    metrics.observe_timings(
        RequestTimings(
            prefill_ms=120.0,
            transfer_ms=3.0,
            transfer_busy_ms=9.0,
            transfer_bytes=4096,
            transfer_descriptors=2,
            num_computed_tokens=40,
            num_prefill_cached_tokens=16,
            prefill_worker="worker-0",
        )
    )
    shown = text(metrics)
    assert 'leadout_worker_handoffs_total{prefill_worker="worker-0"} 1.0' in shown
    assert "leadout_worker_handoff_bytes_sum 4096.0" in shown
    assert "leadout_worker_handoff_descriptors_sum 2.0" in shown
    assert "leadout_worker_handoff_gbps_sum 0.00045" in shown  # 4,096 bytes in 9 ms
    assert 'leadout_worker_prompt_tokens_by_source_total{source="prefill_cache"} 16.0' in shown
    assert 'leadout_worker_request_phase_seconds_sum{phase="prefill"} 0.12' in shown


def timings_of_a_handoff(num_bytes: int, num_descriptors: int, busy_ms: float) -> RequestTimings:
    return RequestTimings(
        transfer_bytes=num_bytes,
        transfer_descriptors=num_descriptors,
        transfer_busy_ms=busy_ms,
        prefill_worker="worker-0",
    )


def test_what_a_handoff_moved_and_how_fast() -> None:
    metrics = WorkerMetrics()
    metrics.observe_timings(timings_of_a_handoff(60_000_000, 3, 20.0))  # 3 GB/s
    metrics.observe_timings(timings_of_a_handoff(16 * 1024, 40, 1.6384))  # 0.01 GB/s, but for rounding
    shown = value_of(metrics)
    assert shown("handoff_bytes_count") == 2
    assert shown("handoff_bytes_sum") == 60_000_000 + 16 * 1024
    assert shown("handoff_bytes_bucket", le="16384.0") == 1, "16 KiB is the smallest bucket"
    assert shown("handoff_bytes_bucket", le="6.7108864e+07") == 2, "64 MiB"
    assert shown("handoff_descriptors_sum") == 43
    assert shown("handoff_descriptors_bucket", le="4.0") == 1
    assert shown("handoff_descriptors_bucket", le="64.0") == 2
    assert shown("handoff_gbps_sum") == pytest.approx(3.01)
    assert (shown("handoff_gbps_bucket", le="2.0"), shown("handoff_gbps_bucket", le="4.0")) == (1, 2)


def test_a_handoff_without_writes_has_no_throughput() -> None:
    """The decode worker had all of the prompt's blocks but the last, or the writes took no time."""
    metrics = WorkerMetrics()
    metrics.observe_timings(timings_of_a_handoff(0, 0, 0.0))
    shown = value_of(metrics)
    assert shown("handoffs_total", prefill_worker="worker-0") == 1
    for name in ("handoff_bytes_count", "handoff_descriptors_count", "handoff_gbps_count"):
        assert shown(name) == 0
    metrics.observe_timings(timings_of_a_handoff(1000, 1, 0.0))
    assert shown("handoff_gbps_sum") == 1.0, "counted as a microsecond"


def test_a_prompt_computed_here_is_no_handoff() -> None:
    metrics = WorkerMetrics()
    metrics.observe_timings(RequestTimings(num_computed_tokens=5))
    assert "leadout_worker_handoffs_total{" not in text(metrics)


def test_handoffs_in_hand_by_state() -> None:
    metrics = WorkerMetrics()
    shown = value_of(metrics)
    metrics.set_load(LoadReport(handoffs={"streaming": 2, "fencing": 1}))
    states = ("reserved", "streaming", "sealed", "active", "fencing")
    assert [shown("live_handoffs", state=state) for state in states] == [0, 2, 0, 0, 1]
    metrics.set_load(LoadReport(handoffs={"sealed": 1}))
    assert [shown("live_handoffs", state=state) for state in states] == [0, 0, 1, 0, 0]


def test_every_state_of_a_live_handoff_is_shown() -> None:
    states = {state.value for state in HandoffState} - {"released"}
    assert set(HANDOFF_STATES) == states


def test_how_handoffs_end() -> None:
    metrics = WorkerMetrics()
    shown = value_of(metrics)
    outcomes = [outcome.value for outcome in HandoffOutcome]
    assert [shown("handoffs_ended_total", outcome=outcome) for outcome in outcomes] == [0, 0, 0], "from start"
    metrics.handoff_ended("completed", None)
    metrics.handoff_ended("fenced", 0.02)
    metrics.handoff_ended("fenced", 0.3)
    metrics.handoff_ended("writer_gone", 7.0)
    counts = {outcome: shown("handoffs_ended_total", outcome=outcome) for outcome in outcomes}
    assert counts == {"completed": 1, "fenced": 2, "writer_gone": 1}
    assert shown("handoff_fence_seconds_count") == 3, "what was completed has not been fenced"
    assert shown("handoff_fence_seconds_sum") == pytest.approx(7.32)
    assert shown("handoff_fence_seconds_bucket", le="0.025") == 1
    assert shown("handoff_fence_seconds_bucket", le="0.5") == 2
    assert shown("handoff_fence_seconds_bucket", le="10.0") == 3


def test_a_fence_that_was_confirmed_at_once_counts() -> None:
    metrics = WorkerMetrics()
    metrics.handoff_ended("fenced", 0.0)
    assert value_of(metrics)("handoff_fence_seconds_count") == 1


def test_ended_leases_and_wrong_bytes() -> None:
    metrics = WorkerMetrics()
    shown = value_of(metrics)
    assert [shown("lease_expiries_total", lease=lease) for lease in ("handoff", "router")] == [0, 0]
    assert shown("checksum_mismatches_total") == 0
    metrics.lease_expired("handoff")
    metrics.lease_expired("handoff")
    metrics.lease_expired("router")
    metrics.checksum_mismatch()
    assert [shown("lease_expiries_total", lease=lease) for lease in ("handoff", "router")] == [2, 1]
    assert shown("checksum_mismatches_total") == 1


def test_dropped_messages_never_go_down() -> None:
    metrics = WorkerMetrics()
    shown = value_of(metrics)
    metrics.set_dropped({"malformed": 2, "undeliverable": 0})
    metrics.set_dropped({"malformed": 2, "undeliverable": 5})
    assert shown("dropped_messages_total", reason="malformed") == 2
    assert shown("dropped_messages_total", reason="undeliverable") == 5
    metrics.set_dropped({"malformed": 0, "undeliverable": 6})  # whoever counts them started anew
    assert shown("dropped_messages_total", reason="malformed") == 2
    assert shown("dropped_messages_total", reason="undeliverable") == 6
    metrics.set_dropped({"malformed": 1, "undeliverable": 6})
    assert shown("dropped_messages_total", reason="malformed") == 3
    metrics.message_dropped("old_attempt")
    metrics.message_dropped("malformed")
    assert shown("dropped_messages_total", reason="old_attempt") == 1
    assert shown("dropped_messages_total", reason="malformed") == 4, "a role's own count comes on top"


def test_links_come_and_go_with_their_peers() -> None:
    metrics = WorkerMetrics()
    shown = value_of(metrics)

    def links() -> dict[tuple[str, str], float | None]:
        keys = [(peer, measured) for peer in ("d0", "d1") for measured in ("probe", "writes")]
        return {
            (peer, measured): value
            for peer, measured in keys
            if (value := shown("link_gbps", peer=peer, measured=measured)) is not None
        }

    assert links() == {}
    metrics.set_load(LoadReport(links=(LinkReport(peer="d0", probe_gbps=4.0, gbps=3.5),)))
    assert links() == {("d0", "probe"): 4.0, ("d0", "writes"): 3.5}
    metrics.set_load(
        LoadReport(
            links=(
                LinkReport(peer="d0", probe_gbps=4.0, gbps=0.25),
                LinkReport(peer="d1", probe_gbps=0.0, gbps=0.0),
            )
        )
    )
    assert links() == {("d0", "probe"): 4.0, ("d0", "writes"): 0.25, ("d1", "probe"): 0, ("d1", "writes"): 0}
    metrics.set_load(LoadReport(links=(LinkReport(peer="d1", probe_gbps=2.0, gbps=2.0),)))
    assert links() == {("d1", "probe"): 2.0, ("d1", "writes"): 2.0}, "no stale value of a peer that left"
    metrics.set_load(LoadReport())
    assert links() == {}
    metrics.set_load(LoadReport(links=(LinkReport(peer="d0", probe_gbps=1.0, gbps=1.0),)))
    assert links() == {("d0", "probe"): 1.0, ("d0", "writes"): 1.0}


def test_the_endpoint() -> None:
    metrics = WorkerMetrics()
    assert metrics.serve("127.0.0.1", -1) == ""
    url = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(url) as response:
        assert b"leadout_worker_kv_blocks_free" in response.read()
    metrics.close()
    metrics.close()
    with pytest.raises(OSError, match=r"refused|closed|urlopen"):
        urllib.request.urlopen(url, timeout=1)


def test_every_counter_of_the_transport_is_a_metric() -> None:
    metrics = WorkerMetrics()
    ones = dict.fromkeys(TransferCounters.__struct_fields__, 1)
    metrics.set_load(LoadReport(transfers=TransferCounters(**ones)))
    shown = [line for line in text(metrics).splitlines() if line.startswith("leadout_worker_transfer_")]
    assert sum(line.endswith("_total 1.0") for line in shown) == len(ones)
