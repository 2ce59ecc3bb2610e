"""The routing policy: state in, plan out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.settings import RouterConfig
from router.policy.longest_prefix import LongestPrefixPolicy
from router.policy.plan import NoWorkerError, Plan, RequestSnapshot
from router.services import policy_settings
from router.state.cluster_state import ClusterState
from router.state.prompt_hashes import PromptHashes
from tests.router.count_calls import number_of_calls
from tests.router.factories import BLOCK_SIZE, add_worker, cluster_state, model_identity

SETTINGS = policy_settings(RouterConfig())
PROMPT = list(range(4000))


def plan(num_tokens: int, state: ClusterState, settings: Any = SETTINGS, **fields: Any) -> Plan:
    """Plan a request for the first ``num_tokens`` of PROMPT."""
    fields = {"model": "test-model", "is_explained": True} | fields
    request = RequestSnapshot(num_tokens=num_tokens, hashes=PromptHashes(PROMPT[:num_tokens]), **fields)
    return LongestPrefixPolicy(settings).plan(state, request, now=0.0)


def cluster(**workers: Mapping[str, Any]) -> ClusterState:
    """Those whose name begins with p are prefill workers, unless they say otherwise."""
    return cluster_state(
        PROMPT,
        **{
            name: {"role": "prefill" if name[0] == "p" else "decode", **fields}
            for name, fields in workers.items()
        },
    )


def passed_over(decided: Plan) -> dict[str, str]:
    return {row.worker: row.reason for row in decided.candidates}


def test_longest_cached_prefix_wins() -> None:
    decided = plan(64, cluster(d0={}, d1={"cached_tokens": 32, "num_requests": 3}))
    assert (decided.decode_worker, decided.cached_tokens, decided.uncached_tokens) == ("d1", 32, 32)


def test_prefix_does_not_outweigh_overload() -> None:
    decided = plan(64, cluster(d0={}, d1={"cached_tokens": 60, "num_requests": 5}))
    assert decided.decode_worker == "d0"
    assert passed_over(decided)["d1"] == "is overloaded: 5 requests, limit 4"


def test_least_loaded_among_equal_prefixes() -> None:
    state = cluster(d0={"num_requests": 2}, d1={"num_requests": 1}, d2={"num_requests": 3})
    assert plan(64, state).decode_worker == "d1"


def test_full_kv_pool_is_avoided_unless_all_are_full() -> None:
    full = {"blocks_free": 2, "cached_tokens": 16}
    decided = plan(64, cluster(d0=full, d1={"num_requests": 2}))
    assert decided.decode_worker == "d1"
    assert passed_over(decided)["d0"] == "has too few free KV blocks"
    assert plan(64, cluster(d0=full)).decode_worker == "d0"


@pytest.mark.parametrize(("blocks_free", "has_room"), [(12, False), (13, True)])
def test_room_is_for_what_is_not_cached_and_the_next_token(blocks_free: int, has_room: bool) -> None:
    """64 tokens and one more take 17 blocks of 4; 16 tokens of them are cached."""
    state = cluster(d0={"blocks_free": blocks_free, "cached_tokens": 16}, d1={})
    assert (plan(64, state).decode_worker == "d0") == has_room


def test_short_uncached_prompts_are_prefilled_locally() -> None:
    state = cluster(d0={}, p0={})
    assert plan(16, state).prefill_worker is None
    assert plan(17, state).prefill_worker == "p0"
    assert plan(64, cluster(d0={"cached_tokens": 48}, p0={})).decision == "local"


def test_prefill_worker_by_prefix_then_outstanding_tokens() -> None:
    decided = plan(64, cluster(d0={}, p0={}, p1={"cached_tokens": 32}))
    assert (decided.prefill_worker, decided.uncached_tokens) == ("p1", 32)
    assert plan(64, cluster(d0={}, p0={"prefill_tokens": 100}, p1={})).prefill_worker == "p1"


def test_cached_prefix_on_a_buried_prefill_worker_is_left() -> None:
    decided = plan(64, cluster(d0={}, p0={"cached_tokens": 60, "prefill_tokens": 10_000}, p1={}))
    assert decided.prefill_worker == "p1"
    assert passed_over(decided)["p0"] == "is overloaded: 10004 tokens, limit 128"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_reachable": False}, "is unreachable"),
        ({"is_reachable": False, "reports": "draining"}, "is unreachable"),
        ({"reports": "draining"}, "is draining"),
        ({"reports": "starting"}, "is starting"),
        ({"max_model_len": 64}, "takes at most 64 tokens"),
        ({"blocks_total": 16}, "has only 16 KV blocks of 4 tokens"),
    ],
)
def test_unusable_decode_workers_are_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoWorkerError, match=f"d0 {reason}"):
        plan(64, cluster(d0=fields))


def test_a_worker_that_has_not_reported_is_not_used() -> None:
    state = ClusterState()
    add_worker(state, "d0")
    state.get("d0").load = None  # type: ignore[union-attr]
    state.get("d0").set_reachable(True)  # type: ignore[union-attr]
    with pytest.raises(NoWorkerError, match="d0 is starting"):
        plan(64, state)


def test_an_error_names_the_first_few_of_many() -> None:
    draining = {f"d{number}": {"reports": "draining"} for number in range(9)}
    with pytest.raises(NoWorkerError, match=r"d0 is draining; .*d3 is draining; and 5 more$"):
        plan(64, cluster(**draining))


def test_a_worker_that_takes_both_prefills_for_itself() -> None:
    decided = plan(64, cluster(d0={"role": "both"}, p0={}))
    assert (decided.decode_worker, decided.prefill_worker) == ("d0", None)
    assert decided.reason == "local prefill: the decode worker takes prefills, too"


def test_a_worker_that_takes_both_prefills_for_others() -> None:
    decided = plan(64, cluster(d0={}, p0={"role": "both", "num_requests": 9}))
    assert (decided.decode_worker, decided.prefill_worker) == ("d0", "p0")


def test_no_decode_worker_at_all() -> None:
    with pytest.raises(NoWorkerError, match="no decode worker is registered"):
        plan(64, cluster(p0={}))


def test_workers_of_another_model_do_not_count() -> None:
    other = model_identity(name="other", max_model_len=4096)
    decided = plan(64, cluster(d0={"num_requests": 3}, d1={"model": other}, p1={"model": other}))
    assert (decided.decode_worker, decided.decision) == ("d0", "local")
    assert set(passed_over(decided)) == {"d0"}


def test_excluded_worker_is_not_tried_again() -> None:
    decided = plan(
        64, cluster(d0={"cached_tokens": 60}, d1={}), excluded_workers=frozenset({"d0", "has-left"})
    )
    assert decided.decode_worker == "d1"
    assert passed_over(decided)["d0"] == "already failed this request"


def test_an_unreachable_worker_is_passed_over_for_a_worse_one() -> None:
    lost = {"cached_tokens": 60, "is_reachable": False}
    decided = plan(64, cluster(d0=lost, d1={"num_requests": 4}, p0=lost, p1={"prefill_tokens": 10_000}))
    assert (decided.decode_worker, decided.prefill_worker) == ("d1", "p1")
    assert passed_over(decided) == {"d0": "is unreachable", "d1": "", "p0": "is unreachable", "p1": ""}


def test_without_a_reachable_prefill_worker_the_decode_worker_prefills() -> None:
    decided = plan(64, cluster(d0={}, p0={"is_reachable": False}))
    assert decided.prefill_worker is None
    assert decided.reason == "local prefill: no compatible prefill worker is ready"


@pytest.mark.parametrize(("num_failed", "prefill_worker"), [(0, "p0"), (1, "p0"), (2, None), (3, None)])
def test_after_two_failed_prefills_the_decode_worker_prefills(
    num_failed: int, prefill_worker: str | None
) -> None:
    decided = plan(64, cluster(d0={}, p0={}), num_failed_prefills=num_failed)
    assert decided.prefill_worker == prefill_worker
    if prefill_worker is None:
        assert decided.reason == f"local prefill: {num_failed} prefill workers have failed this request"
        assert (decided.cached_tokens, decided.uncached_tokens) == (0, 64)


def test_how_many_prefills_may_fail_is_a_setting() -> None:
    settings = replace(SETTINGS, max_failed_prefills=1)
    assert plan(64, cluster(d0={}, p0={}), settings, num_failed_prefills=1).decision == "local"


def test_incompatible_prefill_worker_is_not_used() -> None:
    other = model_identity(dtype="bfloat16", max_model_len=4096)
    decided = plan(64, cluster(d0={}, p0={"model": other}))
    assert decided.prefill_worker is None
    assert "no compatible prefill worker" in decided.reason
    assert passed_over(decided)["p0"] == "cannot hand over to d0: not compatible"


def test_fully_cached_prompt_still_computes_its_last_block() -> None:
    assert plan(64, cluster(d0={"cached_tokens": 64})).uncached_tokens == BLOCK_SIZE


def test_explanation_is_small_json() -> None:
    workers = {f"d{number}": {"num_requests": number * 10} for number in range(40)}
    explained = plan(64, cluster(**workers, p0={})).explain()
    assert explained["num_candidates"] == 41
    assert explained["candidates"][0]["worker"] == "d0"
    assert len(json.dumps(explained)) < 3000


def test_candidates_are_listed_only_where_they_are_asked_for() -> None:
    state = cluster(d0={}, d1={"reports": "draining"}, p0={})
    quiet = plan(64, state, is_explained=False)
    assert quiet.candidates == ()
    assert replace(plan(64, state), candidates=()) == quiet


fleets = st.dictionaries(
    st.sampled_from([f"w{number}" for number in range(6)]),
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["prefill", "decode", "both"]),
            "reports": st.sampled_from(["ready", "ready", "draining", "starting"]),
            "is_reachable": st.sampled_from([True, True, False]),
            "num_requests": st.integers(0, 50),
            "prefill_tokens": st.integers(0, 5000),
            "blocks_free": st.integers(0, 1000),
            "cached_tokens": st.integers(0, 200),
            "model": st.sampled_from(
                [model_identity(dtype=dtype, max_model_len=4096) for dtype in ("float32", "bfloat16")]
            ),
        }
    ),
)


@given(workers=fleets, num_tokens=st.integers(1, 3999), data=st.data())
def test_a_plan_is_always_executable(
    workers: dict[str, dict[str, Any]], num_tokens: int, data: st.DataObject
) -> None:
    usable = {
        name: fields
        for name, fields in workers.items()
        if fields["reports"] == "ready" and fields["is_reachable"]
    }
    state = cluster_state(PROMPT, **workers)
    try:
        decided = plan(num_tokens, state)
    except NoWorkerError:
        assert all(fields["role"] == "prefill" for fields in usable.values())
        return
    chosen = usable[decided.decode_worker]
    assert chosen["role"] != "prefill"
    decoding = [fields for fields in usable.values() if fields["role"] != "prefill"]
    assert 0 < decided.uncached_tokens <= num_tokens
    assert 0 <= decided.cached_tokens < num_tokens
    if all(fields["blocks_free"] == 1000 for fields in decoding):
        assert chosen["num_requests"] <= 2 * min(fields["num_requests"] for fields in decoding) + 4
    if decided.prefill_worker is not None:
        prefill = usable[decided.prefill_worker]
        assert prefill["role"] != "decode"
        assert prefill["model"] == chosen["model"]
        assert num_tokens - decided.cached_tokens > SETTINGS.local_prefill_max_tokens
    for row in decided.candidates:
        assert row.eligible == (not row.reason)
        assert not row.eligible or row.worker in usable
    assert {row.worker for row in decided.candidates if row.role == "decode"} == {
        name for name, fields in workers.items() if fields["role"] != "prefill"
    }
    order = data.draw(st.permutations(list(workers)))
    again = cluster_state(PROMPT, **{name: workers[name] for name in order})
    assert plan(num_tokens, again) == decided, "whatever the order in which they came"


def test_the_work_of_a_decision_does_not_grow_with_the_workers() -> None:
    """Counted in calls, Python's and those into compiled code: per worker there is none."""

    def calls(num_workers: int) -> int:
        workers = {f"d{number}": {"cached_tokens": 32 * (number % 2)} for number in range(num_workers)}
        workers |= {f"p{number}": {"cached_tokens": 16 * (number % 2)} for number in range(num_workers)}
        state = cluster(**workers)
        request = RequestSnapshot(model="test-model", hashes=PromptHashes(PROMPT[:64]), num_tokens=64)
        policy = LongestPrefixPolicy(SETTINGS)
        policy.plan(state, request, now=0.0)  # what follows from the membership is worked out once
        return number_of_calls(lambda: policy.plan(state, request, now=0.0))

    assert calls(400) == calls(40) > 20
