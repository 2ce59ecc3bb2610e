"""Slots, pools and prefix hits, against a plain reading of the same members."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.kv_layout import KvLayout
from cluster.members import WorkerRecord, incompatibility, takes_prefills, takes_requests
from router.state.cluster_state import ClusterState
from router.state.columns import Columns
from router.state.prompt_hashes import PromptHashes
from tests.router.factories import BLOCK_SIZE, cluster_state, load_report, model_identity, worker_record

names = st.sampled_from([f"w{number}" for number in range(40)])
roles = st.sampled_from(["prefill", "decode", "both"])
models = st.builds(
    model_identity, name=st.sampled_from(["m0", "m1"]), dtype=st.sampled_from(["float32", "bfloat16"])
)


class Membership(RuleBasedStateMachine):
    """Workers come, change and go; pools and compatibility are always those of the present records."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.records: dict[str, WorkerRecord] = {}

    @rule(name=names, role=roles, model=models)
    def join_or_change(self, name: str, role: str, model: object) -> None:
        known = self.records.get(name)
        if known is None:
            self.records[name] = worker_record(name, role, model=model)
            self.state.add(self.records[name]).report(load_report())
        else:
            self.records[name] = worker_record(name, role, model=known.model, role_epoch=known.role_epoch + 1)
            self.state.take_over(self.records[name])

    @rule(name=names)
    def leave(self, name: str) -> None:
        if self.records.pop(name, None) is not None:
            self.state.remove(name)

    @rule()
    def everybody_leaves(self) -> None:
        for name in list(self.records):
            self.leave(name)

    @invariant()
    def it_shows_the_records(self) -> None:
        state = self.state
        assert [view.record for view in state.workers] == [
            self.records[name] for name in sorted(self.records)
        ]
        assert len({view.slot for view in state.workers}) == len(state.workers)
        for model in ("m0", "m1", "unknown"):
            pool = state.pool(model)
            of_model = [view for view in state.workers if view.record.model.name == model]
            assert [state.at(slot) for slot in pool.decode] == [
                view for view in of_model if takes_requests(view.record.role)
            ]
            assert [state.at(slot) for slot in pool.prefill] == [
                view for view in of_model if takes_prefills(view.record.role)
            ]
            assert set(pool.groups) == {view.group for view in of_model}
        numbers = state.columns.compatibility
        for one in state.workers:
            assert state.get(one.record.id) is one
            for other in state.workers:
                is_compatible = incompatibility(one.record, other.record) is None
                assert (numbers[one.slot] == numbers[other.slot]) == is_compatible


TestMembership = Membership.TestCase


@given(st.lists(st.integers(0, 64), min_size=1, max_size=70), st.integers(1, 80))
def test_each_worker_gets_its_own_hit(cached: list[int], num_tokens: int) -> None:
    """As many tokens as its cache holds of the prompt, in whole blocks, and never the last token."""
    prompt = list(range(64))
    workers = {f"w{number:02}": {"cached_tokens": tokens} for number, tokens in enumerate(cached)}
    state = cluster_state(prompt, **workers)
    pool = state.pool("test-model")
    found = state.cached_tokens(pool, PromptHashes(prompt), num_tokens)[pool.decode]
    most = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert found.tolist() == [min(tokens // BLOCK_SIZE * BLOCK_SIZE, most) for tokens in cached]


def test_hits_of_workers_with_another_block_size() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=8, dtype="float32")
    state = ClusterState()
    prompt = list(range(64))
    small, large = state.add(worker_record("w0")), state.add(worker_record("w1", kv_layout=layout))
    hashes = PromptHashes(prompt)
    state.kv_index.store(small.slot, hashes.of(small.group)[:3])
    state.kv_index.store(large.slot, hashes.of(large.group)[:3])
    pool = state.pool("test-model")
    assert state.cached_tokens(pool, hashes, 64)[pool.decode].tolist() == [12, 24]


def test_models_that_are_served() -> None:
    other = model_identity(name="other")
    state = cluster_state(
        d0={}, d1={"model": other, "reports": "draining"}, p0={"role": "prefill", "model": other}
    )
    assert state.models(ready=False) == ["other", "test-model"]
    assert state.models(ready=True) == ["test-model"]


def test_the_version_tells_changes_from_reports() -> None:
    state = cluster_state(d0={})
    view = state.workers[0]
    before = state.version
    view.report(load_report(running=3))
    view.set_reachable(True)
    assert state.version == before
    view.set_reachable(False)
    assert state.version != before
    before = state.version
    state.take_over(worker_record("d0", "both", role_epoch=1))
    assert state.version != before


def test_columns_keep_their_rows_when_they_grow() -> None:
    columns = Columns(capacity=2)
    columns.num_requests[:] = (5, 6)
    columns.set_accepts(1, True)
    columns.grow_to(3)
    assert columns.capacity >= 3
    assert columns.num_requests[:2].tolist() == [5, 6]
    assert columns.accepts[:3].tolist() == [False, True, False]
    assert columns.num_requests.dtype == np.int64
