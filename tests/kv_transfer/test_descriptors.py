"""Merged copies move exactly the blocks that were asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.descriptors import BlockCopy, check_block_ids, check_remote_copies, plan_block_copies

BLOCK = 3  # bytes


def apply(copies: list[BlockCopy], local: bytes, size: int) -> bytearray:
    remote = bytearray(b"." * size)
    for copy in copies:
        start, length = copy.local_address - 100, copy.num_bytes
        target = copy.remote_address - 500
        remote[target : target + length] = local[start : start + length]
    return remote


@given(
    st.lists(st.integers(0, 19), max_size=12).flatmap(
        lambda local: st.tuples(
            st.just(local), st.permutations(range(20)).map(lambda order: order[: len(local)])
        )
    )
)
def test_any_pairs_of_blocks(pairs: tuple[list[int], list[int]]) -> None:
    local_ids, remote_ids = pairs
    local = bytes(range(20 * BLOCK))
    copies = plan_block_copies(local_ids, remote_ids, block_bytes=BLOCK, local_base=100, remote_base=500)
    remote = bytearray(b"." * 20 * BLOCK)
    for source, target in zip(local_ids, remote_ids, strict=True):
        remote[target * BLOCK : (target + 1) * BLOCK] = local[source * BLOCK : (source + 1) * BLOCK]
    assert apply(copies, local, len(remote)) == remote


def test_runs_that_follow_each_other_on_both_sides_become_one() -> None:
    def count(local: list[int], remote: list[int]) -> int:
        return len(plan_block_copies(local, remote, block_bytes=BLOCK, local_base=0, remote_base=0))

    assert count([4, 5, 6, 7], [1, 2, 3, 4]) == 1
    assert count([4, 5, 9, 10], [1, 2, 3, 4]) == 2
    assert count([7, 6, 5], [3, 2, 1]) == 1  # pairs may come in any order
    assert count([1, 2, 3], [5, 4, 3]) == 3
    assert count([], []) == 0


@pytest.mark.parametrize(
    ("local", "remote", "named"),
    [
        ([1], [1, 2], "1 local and 2 remote"),
        ([1, 2], [3, 3], "remote block 3 is written twice"),
        ([-1], [0], "local -1"),
        ([0], [-2], "remote -2"),
        ([0], [2**61], f"remote block id {2**61} is out of range; no memory has so many blocks of 3 bytes"),
        ([2**64 - 1], [0], f"local block id {2**64 - 1} is out of range"),
    ],
)
def test_impossible_pairs_are_refused(local: list[int], remote: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_block_copies(local, remote, block_bytes=BLOCK, local_base=0, remote_base=0)


def test_blocks_outside_a_cache_are_named() -> None:
    check_block_ids([0, 3], 4, side="local")
    with pytest.raises(ValueError, match=r"local block id 4 at position 1 is out of range; .* 0 to 3"):
        check_block_ids([0, 4], 4, side="local")
    copies = plan_block_copies([0, 1], [2, 3], block_bytes=BLOCK, local_base=0, remote_base=0)
    check_remote_copies(copies, 4, block_bytes=BLOCK)
    with pytest.raises(ValueError, match="remote block id 3 is out of range; that cache has blocks 0 to 2"):
        check_remote_copies(copies, 3, block_bytes=BLOCK)


def test_a_block_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes must be at least 1, got 0"):
        plan_block_copies([0], [0], block_bytes=0, local_base=0, remote_base=0)
