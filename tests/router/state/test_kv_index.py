"""The KV index against a plain set per worker, and how many lookups it takes."""

from __future__ import annotations

from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.state.kv_index import KvIndex, slots_of

SLOTS = (0, 1, 70)
BLOCKS = [bytes([number]) * 4 for number in range(12)]

operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "replace", "remove_worker"]),
        st.sampled_from(SLOTS),
        st.lists(st.sampled_from(BLOCKS), max_size=6),
    ),
    max_size=40,
)


def apply(index: KvIndex, name: str, slot: int, blocks: list[bytes]) -> None:
    if name == "remove_worker":
        index.remove_worker(slot)
    else:
        getattr(index, name)(slot, blocks)


def hits(index: KvIndex, chain: list[bytes]) -> dict[int, int]:
    found = [(slot, length) for length, workers in index.match(chain) for slot in slots_of(workers)]
    assert len(dict(found)) == len(found), "the sets are disjoint"
    return dict(found)


@given(operations=operations, chain=st.lists(st.sampled_from(BLOCKS), max_size=12, unique=True))
def test_agrees_with_sets(operations: list[tuple[str, int, list[bytes]]], chain: list[bytes]) -> None:
    index = KvIndex()
    model: dict[int, set[bytes]] = {slot: set() for slot in SLOTS}
    for name, slot, blocks in operations:
        apply(index, name, slot, blocks)
        if name == "remove_worker":
            model[slot] = set()
        elif name == "store":
            model[slot] |= set(blocks)
        elif name == "remove":
            model[slot] -= set(blocks)
        else:
            model[slot] = set(blocks)
        index.check_invariants()
    assert len(index) == len(set().union(*model.values()))
    found = hits(index, chain)
    for slot in SLOTS:
        assert index.num_blocks(slot) == len(model[slot])
        holds = [block in model[slot] for block in chain]
        to_first_hole = [*holds, False].index(False)
        length = found.get(slot, 0)
        if not any(holds[to_first_hole:]):
            assert length == to_first_hole, "without a hole the hit is exact"
        assert length >= to_first_hole
        assert length == 0 or holds[length - 1]
        assert length == len(chain) or not holds[length]


@given(
    chain_length=st.integers(1, 300),
    held=st.dictionaries(st.integers(0, 1200), st.integers(0, 300), max_size=20),
)
def test_prefixes_are_found_exactly(chain_length: int, held: dict[int, int]) -> None:
    chain = [number.to_bytes(4, "little") for number in range(chain_length)]
    index = KvIndex()
    for slot, length in held.items():
        index.store(slot, chain[:length])
    expected = {slot: min(length, chain_length) for slot, length in held.items() if length}
    assert hits(index, chain) == expected


class CountingChain(list[bytes]):
    """Counts the blocks that are looked at."""

    num_lookups = 0

    def __getitem__(self, position: SupportsIndex | slice) -> bytes:  # type: ignore[override]
        self.num_lookups += 1
        return super().__getitem__(position)  # type: ignore[return-value,index]


@pytest.mark.parametrize("length", [64, 512, 4096])
def test_lookups_grow_with_the_logarithm_of_the_chain(length: int) -> None:
    blocks = [number.to_bytes(4, "little") for number in range(length)]
    index = KvIndex()
    chain = CountingChain(blocks)
    assert index.match(chain) == []
    assert chain.num_lookups == 1, "a miss"
    for slot in range(1000):
        index.store(slot, blocks[: length // 2])
    chain = CountingChain(blocks)
    assert index.match(chain) == [(length // 2, (1 << 1000) - 1)]
    assert chain.num_lookups <= 2 * length.bit_length(), "a hit that ends in the middle"
    index.store(7, blocks)
    chain = CountingChain(blocks[: length // 2])
    index.match(chain)
    assert chain.num_lookups <= length.bit_length() + 1, "a hit of the whole chain"
    chain = CountingChain(blocks)
    assert index.match(chain)[0] == (length, 1 << 7)
    assert chain.num_lookups <= 3 * length.bit_length(), "two lengths"


@given(operations=operations)
def test_bound_holds(operations: list[tuple[str, int, list[bytes]]]) -> None:
    index = KvIndex(max_blocks=3)
    for name, slot, blocks in operations:
        apply(index, name, slot, blocks)
        index.check_invariants()
        assert len(index) <= 3


def test_full_index_forgets_the_oldest() -> None:
    index = KvIndex(max_blocks=2)
    index.store(0, BLOCKS[:3])
    assert index.num_evicted == 1
    assert index.holders(BLOCKS[0]) == 0
    assert index.holders(BLOCKS[2]) == 1
    assert index.num_blocks(0) == 2
    assert index.match(BLOCKS[:3]) == [], "its first block is unknown"


def test_bound_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_blocks is 0"):
        KvIndex(0)
