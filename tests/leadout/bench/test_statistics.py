"""Figures from timelines whose results are worked out by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadout.bench.client import RequestRecord
from leadout.bench.statistics import (
    Distribution,
    Goodput,
    distribution,
    e2e_ms,
    percentile,
    summarise,
    tpot_ms,
    ttft_ms,
)


def _record(sent_at: float, *token_times: float, tokens: int | None = None) -> RequestRecord:
    """An answer whose pieces came at ``token_times``. All times here are exact in binary."""
    return RequestRecord(
        sent_at=sent_at,
        token_times=list(token_times),
        ended_at=token_times[-1],
        prompt_tokens=10,
        completion_tokens=len(token_times) if tokens is None else tokens,
    )


def _failed(error: str) -> RequestRecord:
    return RequestRecord(sent_at=0.0, token_times=[5.0], ended_at=5.0, completion_tokens=1, error=error)


def test_one_timeline() -> None:
    record = _record(1.0, 1.5, 1.625, 2.0)
    assert ttft_ms(record) == 500
    assert e2e_ms(record) == 1000
    assert tpot_ms(record) == 250  # 500 ms for the second and third token


def test_time_per_token_counts_tokens_and_not_pieces() -> None:
    assert tpot_ms(_record(0.0, 1.0, 2.0, tokens=5)) == 250


def test_an_answer_of_one_token_has_no_time_per_further_token() -> None:
    assert tpot_ms(_record(0.0, 1.0)) is None


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 10.0), (25, 20.0), (50, 30.0), (90, 46.0), (95, 48.0), (100, 50.0)]
)
def test_percentiles_interpolate_between_the_closest_ranks(percent: float, expected: float) -> None:
    assert percentile([10.0, 20.0, 30.0, 40.0, 50.0], percent) == pytest.approx(expected)


def test_percentiles_of_one_sample_are_that_sample() -> None:
    assert [percentile([7.0], percent) for percent in (0, 50, 99, 100)] == [7.0] * 4


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_samples(samples: list[float]) -> None:
    result = distribution(samples)
    tolerance = 1e-6
    assert min(samples) <= result.p50 + tolerance
    assert result.p50 <= result.p95 + tolerance
    assert result.p95 <= result.p99 + tolerance
    assert result.p99 <= result.max + tolerance
    assert result.max == max(samples)
    assert result.count == len(samples)


def test_a_distribution_does_not_need_sorted_samples() -> None:
    assert distribution([3.0, 1.0, 2.0]) == Distribution(
        count=3, mean=2.0, p50=2.0, p95=pytest.approx(2.9), p99=pytest.approx(2.98), max=3.0
    )


def test_a_distribution_of_nothing_is_all_zero() -> None:
    assert distribution([]) == Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_summary_of_a_run() -> None:
    first = _record(0.0, 0.5, 0.75, 1.0)
    second = _record(1.0, 1.25, 2.25)
    second.cached_tokens = 5
    result = summarise([first, second], 4.0, None)
    assert (result.num_requests, result.num_failed, result.errors) == (2, 0, {})
    assert result.ttft_ms == distribution([500.0, 250.0])
    assert result.itl_ms == distribution([250.0, 250.0, 1000.0])
    assert result.tpot_ms == distribution([250.0, 1000.0])
    assert result.e2e_ms == distribution([1000.0, 1250.0])
    assert result.requests_per_s == 0.5
    assert result.input_tokens_per_s == 5.0
    assert result.output_tokens_per_s == 1.25
    assert result.cached_share == 0.25
    assert result.good_requests_per_s is None


def test_failed_requests_count_in_no_figure_but_the_errors() -> None:
    fine = _record(0.0, 0.5, 1.0)
    result = summarise([_failed("HTTP 500"), fine, _failed("HTTP 500"), _failed("ReadError")], 1.0, Goodput())
    alone = summarise([fine], 1.0, Goodput())
    assert (result.num_requests, result.num_failed) == (4, 3)
    assert result.errors == {"HTTP 500": 2, "ReadError": 1}
    for figure in ("ttft_ms", "itl_ms", "e2e_ms", "requests_per_s", "output_tokens_per_s"):
        assert getattr(result, figure) == getattr(alone, figure)
    assert result.good_requests_per_s == 1.0


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        (Goodput(), 3),
        (Goodput(ttft_ms=500), 2),  # the limit itself is good
        (Goodput(ttft_ms=499), 1),
        (Goodput(tpot_ms=250), 2),  # an answer of one token keeps any limit per further token
        (Goodput(e2e_ms=1000), 2),
        (Goodput(ttft_ms=500, tpot_ms=250), 1),
        (Goodput(ttft_ms=1), 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: Goodput, num_good: int) -> None:
    records = [
        _record(0.0, 0.5, 0.75, 1.0),  # ttft 500, tpot 250, e2e 1000
        _record(0.0, 0.25, 0.75),  # ttft 250, tpot 500, e2e 750
        _record(0.0, 2.0),  # ttft 2000, no tpot, e2e 2000
    ]
    assert summarise(records, 2.0, limits).good_requests_per_s == num_good / 2


def test_a_server_s_own_account_is_given_as_medians() -> None:
    records = [_record(0.0, 1.0) for _ in range(4)]
    records[0].server_timings = {"queue_ms": 1, "path": "remote", "transfer_ms": 4.0}
    records[1].server_timings = {"queue_ms": 3.0}
    records[2].server_timings = {"queue_ms": 10.0, "transfer_ms": 6.0}
    assert summarise(records, 1.0, None).server_ms == {"queue_ms": 3.0, "transfer_ms": 5.0}


def test_a_run_without_any_success_has_figures_of_zero() -> None:
    result = summarise([_failed("HTTP 503")], 0.0, Goodput(ttft_ms=1))
    assert result.ttft_ms == Distribution()
    assert (result.requests_per_s, result.cached_share, result.good_requests_per_s) == (0.0, 0.0, 0.0)


def test_the_result_is_plain_json() -> None:
    result = summarise([_record(0.0, 0.5, 1.0)], 1.0, None)
    read = json.loads(json.dumps(result.to_json()))
    assert read["ttft_ms"]["p50"] == 500.0
    assert read["good_requests_per_s"] is None
