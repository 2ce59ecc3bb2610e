"""The routing policy: data in, plan out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.settings import RouterConfig
from router.policy.choose_workers import choose_workers
from router.policy.plan import NoWorkerError, RequestSnapshot, WorkerSnapshot
from router.services import policy_settings
from tests.router.factories import BLOCK_SIZE, worker_snapshot

SETTINGS = policy_settings(RouterConfig())


def request(num_tokens: int = 64, **fields: object) -> RequestSnapshot:
    return RequestSnapshot(num_prompt_tokens=num_tokens, **fields)  # type: ignore[arg-type]


def decode(worker_id: str, **fields: object) -> WorkerSnapshot:
    return worker_snapshot(worker_id, **({"peers": frozenset({"p0", "p1"})} | fields))


def test_longest_cached_prefix_wins() -> None:
    plan = choose_workers(
        request(), [decode("d0"), decode("d1", cached_tokens=32, num_requests=3)], [], SETTINGS
    )
    assert (plan.decode_worker, plan.cached_tokens, plan.uncached_tokens) == ("d1", 32, 32)


def test_prefix_does_not_outweigh_overload() -> None:
    plan = choose_workers(
        request(), [decode("d0"), decode("d1", cached_tokens=60, num_requests=5)], [], SETTINGS
    )
    assert plan.decode_worker == "d0"
    row = next(row for row in plan.candidates if row.worker == "d1")
    assert row.reason == "is overloaded: 5 requests, limit 4"


def test_least_loaded_among_equal_prefixes() -> None:
    workers = [decode("d0", num_requests=2), decode("d1", num_requests=1), decode("d2", num_requests=3)]
    assert choose_workers(request(), workers, [], SETTINGS).decode_worker == "d1"


def test_full_kv_pool_is_avoided_unless_all_are_full() -> None:
    full = decode("d0", kv_blocks_free=2, cached_tokens=16)
    roomy = decode("d1", num_requests=2)
    assert choose_workers(request(), [full, roomy], [], SETTINGS).decode_worker == "d1"
    assert choose_workers(request(), [full], [], SETTINGS).decode_worker == "d0"


def test_short_uncached_prompts_are_prefilled_locally() -> None:
    prefill = [worker_snapshot("p0")]
    assert choose_workers(request(16), [decode("d0")], prefill, SETTINGS).prefill_worker is None
    assert choose_workers(request(17), [decode("d0")], prefill, SETTINGS).prefill_worker == "p0"
    cached = decode("d0", cached_tokens=48)
    assert choose_workers(request(64), [cached], prefill, SETTINGS).decision == "local"


def test_prefill_worker_by_prefix_then_outstanding_tokens() -> None:
    plan = choose_workers(
        request(),
        [decode("d0")],
        [worker_snapshot("p0"), worker_snapshot("p1", cached_tokens=32)],
        SETTINGS,
    )
    assert (plan.prefill_worker, plan.uncached_tokens) == ("p1", 32)
    plan = choose_workers(
        request(),
        [decode("d0")],
        [worker_snapshot("p0", num_outstanding_prefill_tokens=100), worker_snapshot("p1")],
        SETTINGS,
    )
    assert plan.prefill_worker == "p1"


def test_cached_prefix_on_a_buried_prefill_worker_is_left() -> None:
    buried = worker_snapshot("p0", cached_tokens=60, num_outstanding_prefill_tokens=10_000)
    plan = choose_workers(request(), [decode("d0")], [buried, worker_snapshot("p1")], SETTINGS)
    assert plan.prefill_worker == "p1"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_reachable": False}, "is unreachable"),
        ({"is_reachable": False, "state": "draining"}, "is unreachable"),
        ({"state": "draining"}, "is draining"),
        ({"state": "starting"}, "is starting"),
        ({"max_model_len": 64}, "takes at most 64 tokens"),
        ({"kv_blocks_total": 16}, "has only 16 KV blocks"),
    ],
)
def test_unusable_decode_workers_are_named(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(NoWorkerError, match=f"d0 {reason}"):
        choose_workers(request(), [decode("d0", **fields)], [], SETTINGS)


def test_a_worker_that_takes_both_prefills_for_itself() -> None:
    both = decode("d0")
    plan = choose_workers(request(), [both], [both, worker_snapshot("p0")], SETTINGS)
    assert (plan.decode_worker, plan.prefill_worker) == ("d0", None)
    assert plan.reason == "local prefill: the decode worker takes prefills, too"


def test_a_worker_that_takes_both_prefills_for_others() -> None:
    both = worker_snapshot("p0", num_requests=9)
    plan = choose_workers(request(), [decode("d0"), both], [both], SETTINGS)
    assert (plan.decode_worker, plan.prefill_worker) == ("d0", "p0")


def test_no_decode_worker_at_all() -> None:
    with pytest.raises(NoWorkerError, match="no decode worker is registered"):
        choose_workers(request(), [], [worker_snapshot("p0")], SETTINGS)


def test_excluded_worker_is_not_tried_again() -> None:
    plan = choose_workers(
        request(excluded_workers=frozenset({"d0"})),
        [decode("d0", cached_tokens=60), decode("d1")],
        [],
        SETTINGS,
    )
    assert plan.decode_worker == "d1"


def test_an_unreachable_worker_is_passed_over_for_a_worse_one() -> None:
    decode_workers = [decode("d0", cached_tokens=60, is_reachable=False), decode("d1", num_requests=4)]
    prefill_workers = [
        worker_snapshot("p0", cached_tokens=60, is_reachable=False),
        worker_snapshot("p1", num_outstanding_prefill_tokens=10_000),
    ]
    plan = choose_workers(request(), decode_workers, prefill_workers, SETTINGS)
    assert (plan.decode_worker, plan.prefill_worker) == ("d1", "p1")
    assert {row.worker: row.reason for row in plan.candidates} == {
        "d0": "is unreachable",
        "d1": "",
        "p0": "is unreachable",
        "p1": "",
    }


def test_without_a_reachable_prefill_worker_the_decode_worker_prefills() -> None:
    plan = choose_workers(request(), [decode("d0")], [worker_snapshot("p0", is_reachable=False)], SETTINGS)
    assert plan.prefill_worker is None
    assert plan.reason == "local prefill: no compatible prefill worker is ready"


@pytest.mark.parametrize(("num_failed", "prefill_worker"), [(0, "p0"), (1, "p0"), (2, None), (3, None)])
def test_after_two_failed_prefills_the_decode_worker_prefills(
    num_failed: int, prefill_worker: str | None
) -> None:
    plan = choose_workers(
        request(num_failed_prefills=num_failed), [decode("d0")], [worker_snapshot("p0")], SETTINGS
    )
    assert plan.prefill_worker == prefill_worker
    if prefill_worker is None:
        assert plan.reason == f"local prefill: {num_failed} prefill workers have failed this request"
        assert (plan.cached_tokens, plan.uncached_tokens) == (0, 64)


def test_how_many_prefills_may_fail_is_a_setting() -> None:
    settings = replace(SETTINGS, max_failed_prefills=1)
    plan = choose_workers(request(num_failed_prefills=1), [decode("d0")], [worker_snapshot("p0")], settings)
    assert plan.decision == "local"


def test_incompatible_prefill_worker_is_not_used() -> None:
    plan = choose_workers(request(), [decode("d0", peers=frozenset())], [worker_snapshot("p0")], SETTINGS)
    assert plan.prefill_worker is None
    assert "no compatible prefill worker" in plan.reason
    assert "not compatible" in plan.candidates[-1].reason


def test_fully_cached_prompt_still_computes_its_last_block() -> None:
    plan = choose_workers(request(64), [decode("d0", cached_tokens=64)], [], SETTINGS)
    assert plan.uncached_tokens == BLOCK_SIZE


def test_explanation_is_small_json() -> None:
    workers = [decode(f"d{number}", num_requests=number * 10) for number in range(40)]
    explained = choose_workers(request(), workers, [worker_snapshot("p0")], SETTINGS).explain()
    assert explained["num_candidates"] == 41
    assert explained["candidates"][0]["worker"] == "d0"
    assert len(json.dumps(explained)) < 3000


snapshots = st.builds(
    worker_snapshot,
    st.sampled_from(["w0", "w1", "w2", "w3", "w4"]),
    state=st.sampled_from(["ready", "ready", "draining", "starting"]),
    is_reachable=st.sampled_from([True, True, False]),
    num_requests=st.integers(0, 50),
    num_outstanding_prefill_tokens=st.integers(0, 5000),
    kv_blocks_free=st.integers(0, 1000),
    cached_tokens=st.integers(0, 200),
    peers=st.frozensets(st.sampled_from(["w0", "w1", "w2"])),
)
fleets = st.lists(snapshots, max_size=5, unique_by=lambda worker: worker.id)


@given(decode_workers=fleets, prefill_workers=fleets, num_tokens=st.integers(1, 3999))
def test_a_plan_is_always_executable(
    decode_workers: list[WorkerSnapshot], prefill_workers: list[WorkerSnapshot], num_tokens: int
) -> None:
    try:
        plan = choose_workers(request(num_tokens), decode_workers, prefill_workers, SETTINGS)
    except NoWorkerError:
        assert not any(worker.state == "ready" and worker.is_reachable for worker in decode_workers)
        return
    chosen = next(worker for worker in decode_workers if worker.id == plan.decode_worker)
    assert chosen.state == "ready"
    assert chosen.is_reachable
    ready = [worker for worker in decode_workers if worker.state == "ready" and worker.is_reachable]
    assert 0 < plan.uncached_tokens <= num_tokens
    assert 0 <= plan.cached_tokens < num_tokens
    if all(worker.kv_blocks_free == 1000 for worker in ready):
        assert chosen.num_requests <= 2 * min(worker.num_requests for worker in ready) + 4
    if plan.prefill_worker is not None:
        prefill = next(worker for worker in prefill_workers if worker.id == plan.prefill_worker)
        assert prefill.state == "ready"
        assert prefill.is_reachable
        assert prefill.id in chosen.peers
        assert num_tokens - plan.cached_tokens > SETTINGS.local_prefill_max_tokens
    again = choose_workers(
        request(num_tokens), list(reversed(decode_workers)), list(reversed(prefill_workers)), SETTINGS
    )
    assert (again.decode_worker, again.prefill_worker) == (plan.decode_worker, plan.prefill_worker)
