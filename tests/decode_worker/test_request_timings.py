"""The parts of the time to first token add up, and every prompt token is counted once."""

from __future__ import annotations

import pytest

from cluster.members import Peer
from cluster.messages import Generate, RequestTimings, Sealed
from cluster.sequence_spec import RequestKey, SequenceSpec
from decode_worker.request_table import DecodeRequest
from decode_worker.request_timings import request_timings
from tests.engine.prefix_runner import greedy


def request(**fields: object) -> DecodeRequest:
    generate = Generate(
        key=RequestKey("r", 0), spec=SequenceSpec(prompt_token_ids=[1] * 100, sampling=greedy())
    )
    return DecodeRequest(
        request=generate,
        router="router-0",
        router_incarnation=1,
        received_at=10.0,
        prefill_peer=Peer("prefill-0", 1),
        **fields,  # type: ignore[arg-type]
    )


def sealed(num_computed: int) -> Sealed:
    timings = RequestTimings(
        prefill_ms=400.0, transfer_ms=5.0, num_computed_tokens=num_computed, prefill_worker="prefill-0"
    )
    return Sealed(key=RequestKey("r", 0), incarnation=1, token_id=3, logprobs=None, timings=timings)


def test_a_handed_over_prompt() -> None:
    one = request(reserved_at=10.1, sealed_at=10.6, sealed=sealed(60), num_reserved_cached_tokens=16)
    timings = request_timings(one, now=10.62, num_cached_tokens=0, worker_id="decode-0")
    parts = (timings.queue_ms, timings.prefill_queue_ms, timings.prefill_ms, timings.transfer_ms)
    assert parts == pytest.approx((100, 95, 400, 5))
    assert timings.activate_ms == pytest.approx(20)
    assert sum(parts) + timings.activate_ms == pytest.approx(620)
    tokens = (
        timings.num_computed_tokens,
        timings.num_prefill_cached_tokens,
        timings.num_decode_cached_tokens,
    )
    assert tokens == (60, 24, 16)


def test_more_cached_here_than_on_the_prefill_worker_saves_transfer_not_computation() -> None:
    one = request(reserved_at=10.1, sealed_at=10.6, sealed=sealed(100), num_reserved_cached_tokens=48)
    timings = request_timings(one, now=10.6, num_cached_tokens=0, worker_id="decode-0")
    tokens = (
        timings.num_computed_tokens,
        timings.num_prefill_cached_tokens,
        timings.num_decode_cached_tokens,
    )
    assert tokens == (100, 0, 0)


def test_a_prompt_computed_here() -> None:
    one = request(scheduled_at=10.3)
    timings = request_timings(one, now=10.8, num_cached_tokens=32, worker_id="decode-0")
    assert timings.queue_ms == pytest.approx(300)
    assert timings.prefill_ms == pytest.approx(500)
    assert (timings.num_computed_tokens, timings.num_decode_cached_tokens) == (68, 32)
    assert timings.prefill_worker == ""
