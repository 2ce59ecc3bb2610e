"""A prefill worker that fails costs a new plan; and what recoveries look like in the metrics."""

from __future__ import annotations

import pytest

from cluster.messages import Cancel, Generate
from tests.router.dispatch_bench import Bench, plan_of, received, token_ids

PROMPT = list(range(40))  # ten blocks; more than what is prefilled locally


@pytest.fixture
async def bench() -> Bench:
    return Bench()


# --- failed prefills ---------------------------------------------------------------------------------------


async def test_another_prefill_worker_takes_over_for_the_same_decode_worker(bench: Bench) -> None:
    bench.workers(d0=1, p0=1, p1=1)
    generation = bench.start(prompt=PROMPT)
    assert bench.generates() == [("d0", 0, "p0")]
    assert (bench.prefill_tokens("p0"), bench.prefill_tokens("p1")) == (40, 0)
    bench.fails("d0", "prefill_failed", culprit="p0")
    assert bench.generates() == [("d0", 0, "p0"), ("d0", 1, "p1")]
    assert (bench.prefill_tokens("p0"), bench.prefill_tokens("p1")) == (0, 40)
    assert bench.sent(Cancel) == [], "the decode worker has ended that attempt itself"
    reasons = {row.worker: row.reason for row in plan_of(generation).candidates}
    assert reasons == {"d0": "", "p0": "already failed this request", "p1": ""}
    bench.tokens("d0", 5, attempt=1, finish_reason="stop")
    assert token_ids(await received(generation)) == [5]


async def test_after_two_failed_prefills_the_decode_worker_prefills(bench: Bench) -> None:
    bench.workers(d0=1, p0=1, p1=1, p2=1)
    generation = bench.start(prompt=PROMPT)
    bench.fails("d0", "prefill_failed", culprit="p0")
    bench.fails("d0", "prefill_failed", culprit="p1", attempt=1)
    assert bench.generates() == [("d0", 0, "p0"), ("d0", 1, "p1"), ("d0", 2, None)]
    plan = plan_of(generation)
    assert plan.reason == "local prefill: 2 prefill workers have failed this request"
    assert (plan.decision, plan.uncached_tokens) == ("local", 40)
    assert bench.prefill_tokens("d0") == 40
    assert bench.metric("plan_decisions_total", decision="remote") == 2
    assert bench.metric("plan_decisions_total", decision="local") == 1


async def test_without_another_prefill_worker_the_decode_worker_prefills(bench: Bench) -> None:
    bench.workers(d0=1, p0=1)
    generation = bench.start(prompt=PROMPT)
    bench.fails("d0", "prefill_failed", culprit="p0")
    assert bench.generates() == [("d0", 0, "p0"), ("d0", 1, None)]
    assert plan_of(generation).reason == "local prefill: no compatible prefill worker is ready"


async def test_what_has_landed_is_not_computed_again(bench: Bench) -> None:
    """Four of ten blocks have: the decode worker's cache counts for the plan."""
    bench.workers(d0=1, p0=1, p1=1)
    generation = bench.start(prompt=PROMPT)
    bench.lands("d0", PROMPT, 4)
    bench.fails("d0", "prefill_failed", culprit="p0")
    assert bench.generates()[-1] == ("d0", 1, "p1")
    plan = plan_of(generation)
    assert plan.reason == "remote prefill: 24 uncached tokens on the decode worker"
    assert plan.cached_tokens == 16


async def test_a_short_rest_is_computed_by_the_decode_worker(bench: Bench) -> None:
    bench.workers(d0=1, p0=1, p1=1)
    generation = bench.start(prompt=PROMPT)
    bench.lands("d0", PROMPT, 6)
    bench.fails("d0", "prefill_failed", culprit="p0")
    assert bench.generates()[-1] == ("d0", 1, None)
    plan = plan_of(generation)
    assert plan.reason == "local prefill: 16 uncached tokens, at most 16 are prefilled locally"
    assert (plan.cached_tokens, plan.uncached_tokens) == (24, 16)
    assert bench.prefill_tokens("d0") == 16


async def test_what_has_landed_keeps_the_request_where_it_is(bench: Bench) -> None:
    bench.workers(d0=1, d1=1, p0=1, p1=1)
    bench.start(prompt=PROMPT)
    bench.start("other")  # d0 is the busier one, but for the prefix
    bench.lands("d0", PROMPT, 4)
    bench.fails("d0", "prefill_failed", culprit="p0")
    assert bench.generates()[-1] == ("d0", 1, "p1")


async def test_an_error_that_names_nobody_is_the_decode_worker_s_own(bench: Bench) -> None:
    bench.workers(d0=1, d1=1, p0=1, p1=1)
    bench.start(prompt=PROMPT)
    bench.fails("d0", "queue_full")
    bench.fails("d1", "queue_full", attempt=1)
    assert bench.generates() == [("d0", 0, "p0"), ("d1", 1, "p0")], "and it is no failed prefill"
    bench.timers.advance(1.0)
    assert bench.generates()[-1] == ("d0", 2, "p0")


async def test_failed_prefills_are_remembered_while_it_waits(bench: Bench) -> None:
    """Who failed is forgotten then, since it may have been started anew; how often is not."""
    bench.workers(d0=1, p0=1, p1=1)
    generation = bench.start(prompt=PROMPT)
    bench.fails("d0", "prefill_failed", culprit="p0")
    bench.fails("d0", "prefill_failed", culprit="p1", attempt=1)
    bench.disconnect("d0")
    bench.timers.advance(1.0)
    bench.report("d0")
    bench.timers.advance(1.0)
    assert bench.generates()[-1] == ("d0", 3, None)
    assert plan_of(generation).reason == "local prefill: 2 prefill workers have failed this request"


async def test_a_migrated_answer_is_prefilled_with_its_tokens(bench: Bench) -> None:
    bench.workers(d0=1, p0=1, d1=1)
    bench.start(prompt=PROMPT)
    bench.tokens("d0", *range(100, 104))
    bench.disconnect("d0")
    (worker, generate) = bench.sent(Generate)[-1]
    assert (worker, generate.prefill_worker, generate.spec.output_token_ids) == (
        "d1",
        "p0",
        [100, 101, 102, 103],
    )
    assert bench.prefill_tokens("p0") == 44


# --- metrics -----------------------------------------------------------------------------------------------


async def test_redispatches_by_reason_and_kind(bench: Bench) -> None:
    bench.workers(d0=1, d1=1, p0=1, p1=1)
    bench.start(prompt=PROMPT)
    bench.fails("d0", "prefill_failed", culprit="p0")
    assert bench.metric("redispatches_total", reason="prefill_failed", kind="retry") == 1
    bench.tokens("d0", 5, attempt=1)
    bench.disconnect("d0")
    assert bench.metric("redispatches_total", reason="worker_lost", kind="migration") == 1
    assert bench.metric("redispatches_total", reason="worker_lost", kind="retry") == 0
    assert bench.metric("redispatches_total", reason="prefill_failed", kind="migration") == 0


async def test_a_recovery_lasts_until_the_next_token(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    bench.start()
    bench.tokens("d0", 5)
    bench.disconnect("d0")
    bench.timers.advance(7.0)
    assert bench.metric("recovery_seconds_count", reason="worker_lost") == 0
    bench.tokens("d1", 6, attempt=1)
    assert bench.metric("recovery_seconds_count", reason="worker_lost") == 1
    assert bench.metric("recovery_seconds_sum", reason="worker_lost") == pytest.approx(7.0)
    bench.timers.advance(5.0)
    bench.tokens("d1", 7, attempt=1)
    bench.tokens("d1", 8, attempt=1, finish_reason="stop")
    assert bench.metric("recovery_seconds_count", reason="worker_lost") == 1


async def test_a_recovery_includes_the_wait_for_a_worker(bench: Bench) -> None:
    bench.workers(d0=1)
    bench.start()
    bench.disconnect("d0")
    bench.timers.advance(9.0)
    bench.report("d0")
    bench.timers.advance(1.0)
    bench.tokens("d0", 5, attempt=1)
    assert bench.metric("recovery_seconds_sum", reason="worker_lost") == pytest.approx(10.0)


async def test_two_losses_in_a_row_are_one_recovery_from_the_first(bench: Bench) -> None:
    bench.workers(d0=1, p0=1, d1=1)
    bench.start(prompt=PROMPT)
    bench.fails("d0", "prefill_failed", culprit="p0")
    bench.timers.advance(2.0)
    bench.disconnect("d0")
    bench.timers.advance(3.0)
    bench.tokens("d1", 5, attempt=2)
    assert bench.metric("recovery_seconds_sum", reason="prefill_failed") == pytest.approx(5.0)
    assert bench.metric("recovery_seconds_count", reason="worker_lost") == 0
    bench.disconnect("d1")
    bench.report("d0")
    bench.timers.advance(1.0)
    bench.tokens("d0", 6, attempt=3)
    assert bench.metric("recovery_seconds_count", reason="worker_lost") == 1, "a later one is another"


async def test_an_undisturbed_request_recovers_from_nothing(bench: Bench) -> None:
    bench.workers(d0=1)
    bench.start()
    bench.tokens("d0", 5, finish_reason="stop")
    shown = {sample.name for family in bench.metrics.recovery_time.collect() for sample in family.samples}
    assert shown == set()
