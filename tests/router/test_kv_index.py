"""The KV index against a plain set per worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.kv_index import KvIndex

WORKERS = ("a", "b", "c")
BLOCKS = [bytes([number]) * 4 for number in range(12)]

operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "replace", "remove_worker"]),
        st.sampled_from(WORKERS),
        st.lists(st.sampled_from(BLOCKS), max_size=6),
    ),
    max_size=40,
)


@given(operations=operations, prompt=st.lists(st.sampled_from(BLOCKS), max_size=8))
def test_agrees_with_sets(operations: list[tuple[str, str, list[bytes]]], prompt: list[bytes]) -> None:
    index = KvIndex()
    model: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
    for name, worker, blocks in operations:
        if name == "remove_worker":
            index.remove_worker(worker)
            model[worker] = set()
        else:
            getattr(index, name)(worker, blocks)
            if name == "store":
                model[worker] |= set(blocks)
            elif name == "remove":
                model[worker] -= set(blocks)
            else:
                model[worker] = set(blocks)
        index.check_invariants()
    assert len(index) == len(set().union(*model.values()))
    for worker in WORKERS:
        assert index.num_blocks(worker) == len(model[worker])
        expected = 0
        while expected < len(prompt) and prompt[expected] in model[worker]:
            expected += 1
        assert index.match(prompt, [worker]) == {worker: expected}
    assert index.match(prompt, WORKERS) == {w: index.match(prompt, [w])[w] for w in WORKERS}


@given(operations=operations)
def test_bound_holds(operations: list[tuple[str, str, list[bytes]]]) -> None:
    index = KvIndex(max_blocks=3)
    for name, worker, blocks in operations:
        if name == "remove_worker":
            index.remove_worker(worker)
        else:
            getattr(index, name)(worker, blocks)
        index.check_invariants()
        assert len(index) <= 3


def test_full_index_forgets_the_oldest() -> None:
    index = KvIndex(max_blocks=2)
    index.store("a", BLOCKS[:3])
    assert index.num_evicted == 1
    assert index.workers(BLOCKS[0]) == ()
    assert index.workers(BLOCKS[2]) == ("a",)
    assert index.num_blocks("a") == 2


def test_a_hole_ends_the_prefix() -> None:
    index = KvIndex()
    index.store("a", [BLOCKS[0], BLOCKS[2]])
    assert index.match(BLOCKS[:3], ["a"]) == {"a": 1}


def test_bound_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_blocks is 0"):
        KvIndex(0)
