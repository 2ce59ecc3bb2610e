"""Copies between KV caches of different layouts: against a dense reference, and against brute force."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.kv_layout import KvLayout
from kv_transfer import layout_planner
from kv_transfer.layout_planner import CacheShape, RankCopies, plan_copies

Values = NDArray[np.uint32]  # as wide as the layouts' float32; only their bytes matter

UNTOUCHED = 0xFFFFFFFF
TP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32, 64)


def plan(
    source: KvLayout,
    target: KvLayout,
    source_block_ids: list[int],
    target_block_ids: list[int],
    *,
    first_token: int = 0,
    num_tokens: int,
    target_first_block: int = 0,
) -> tuple[RankCopies, ...]:
    """Between caches of as many blocks as it takes."""
    return plan_copies(
        CacheShape(source, max(source_block_ids, default=0) + 1),
        CacheShape(target, max(target_block_ids, default=0) + 1),
        source_block_ids,
        target_block_ids,
        first_token=first_token,
        num_tokens=num_tokens,
        target_first_block=target_first_block,
    )


def kv_layout(block_size: int, tp_size: int, *, num_kv_heads: int, num_planes: int = 2) -> KvLayout:
    return KvLayout(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=3,
        block_size=block_size,
        dtype="float32",
        tp_size=tp_size,
        num_planes=num_planes,
    )


def distinct_values(layout: KvLayout, num_tokens: int) -> Values:
    """What the model computed: ``[num_layers, num_planes, num_kv_heads, num_tokens, head_dim]``."""
    shape = (layout.num_layers, layout.num_planes, layout.num_kv_heads, num_tokens, layout.head_dim)
    return np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)


def caches(layout: KvLayout, num_blocks: int) -> list[Values]:
    """Each rank's cache, never written."""
    return [
        np.full((num_blocks, *layout.block_shape), UNTOUCHED, dtype=np.uint32) for _ in range(layout.tp_size)
    ]


def put_tokens(
    ranks: list[Values], layout: KvLayout, dense: Values, tokens: range, blocks: list[int]
) -> None:
    """Write ``tokens`` of ``dense`` where they belong, one by one; ``blocks[i]`` is logical block ``i``."""
    for rank, cache in enumerate(ranks):
        heads = list(layout.heads_of_rank(rank))
        for token in tokens:
            cache[blocks[token // layout.block_size], :, :, :, token % layout.block_size] = dense[
                :, :, heads, token
            ]


def apply(
    copies: tuple[RankCopies, ...], sources: list[Values], targets: list[Values]
) -> list[NDArray[np.int64]]:
    """Move the bytes; returns how often each byte of each target was written."""
    writes = [np.zeros(target.nbytes, dtype=np.int64) for target in targets]
    for pair in copies:
        source = sources[pair.source_rank].reshape(-1).view(np.uint8)
        target = targets[pair.target_rank].reshape(-1).view(np.uint8)
        for local, remote, num_bytes in pair.copies.tolist():
            assert 0 <= local <= source.size - num_bytes
            assert 0 <= remote <= target.size - num_bytes
            target[remote : remote + num_bytes] = source[local : local + num_bytes]
            writes[pair.target_rank][remote : remote + num_bytes] += 1
    return writes


def scattered_blocks(count: int, seed: int) -> list[int]:
    """Block ids of a cache in use: pairs of neighbours, in no order."""
    pairs = np.random.default_rng(seed).permutation(count)[: -(-count // 2)]
    return [int(2 * pair + side) for pair in pairs for side in range(2)][:count]


@pytest.mark.parametrize("source_tp", TP_SIZES)
@pytest.mark.parametrize("target_tp", TP_SIZES)
@pytest.mark.parametrize(
    ("num_kv_heads", "num_planes"),
    [(1, 2), (2, 2), (4, 2), (8, 2), (1, 1)],
    ids=["1", "2", "4", "8", "latent"],
)
@pytest.mark.parametrize("source_block_size", BLOCK_SIZES)
@pytest.mark.parametrize("target_block_size", BLOCK_SIZES)
def test_every_target_rank_gets_what_the_dense_tensor_says(
    source_tp: int,
    target_tp: int,
    num_kv_heads: int,
    num_planes: int,
    source_block_size: int,
    target_block_size: int,
) -> None:
    """A sequence whose first block is there already, in two chunks, the last block partly filled."""
    source = kv_layout(source_block_size, source_tp, num_kv_heads=num_kv_heads, num_planes=num_planes)
    target = kv_layout(target_block_size, target_tp, num_kv_heads=num_kv_heads, num_planes=num_planes)
    room = 256
    source_blocks = scattered_blocks(room // source_block_size, seed=1)
    target_blocks = scattered_blocks(room // target_block_size, seed=2)
    dense = distinct_values(source, room)
    sources = caches(source, 2 * len(source_blocks))
    put_tokens(sources, source, dense, range(room), source_blocks)
    targets = caches(target, 2 * len(target_blocks))

    first, middle, end = target_block_size, 2 * max(source_block_size, target_block_size), 217
    writes = [np.zeros(target.nbytes, dtype=np.int64) for target in targets]
    for start, stop in ((first, middle), (middle, end)):
        copies = plan(
            source,
            target,
            source_blocks,
            target_blocks[1:],
            first_token=start,
            num_tokens=stop - start,
            target_first_block=1,
        )
        for before, now in zip(writes, apply(copies, sources, targets), strict=True):
            before += now

    expected = caches(target, 2 * len(target_blocks))
    whole_blocks = source_block_size == target_block_size
    written_to = -(-end // target_block_size) * target_block_size if whole_blocks else end
    put_tokens(expected, target, dense, range(first, written_to), target_blocks)
    for rank in range(target_tp):
        assert np.array_equal(targets[rank], expected[rank])
        touched = (expected[rank] != UNTOUCHED).reshape(-1).repeat(4)
        assert np.array_equal(writes[rank], touched)  # once, and nowhere else


@st.composite
def transfers(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, list[int], list[int], int, int, int]:
    """Layouts with any block sizes, blocks with holes and in any order, a range within them."""
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 6]))
    tp_sizes = st.sampled_from([n for n in range(1, 13) if num_kv_heads % n == 0 or n % num_kv_heads == 0])
    source = KvLayout(
        num_layers=draw(st.integers(1, 2)),
        num_planes=draw(st.integers(1, 2)),
        num_kv_heads=num_kv_heads,
        head_dim=1,
        block_size=draw(st.integers(1, 6)),
        dtype="float16",
        tp_size=draw(tp_sizes),
    )
    target = msgspec.structs.replace(source, block_size=draw(st.integers(1, 6)), tp_size=draw(tp_sizes))
    step = math.gcd(source.block_size, target.block_size)
    first_token = draw(st.integers(0, 20 // step)) * step
    num_tokens = draw(st.integers(1, 20))
    target_first_block = draw(st.integers(0, first_token // target.block_size))

    def blocks(layout: KvLayout, first_block: int) -> list[int]:
        count = -(-(first_token + num_tokens) // layout.block_size) - first_block
        start = draw(st.integers(0, 3))
        in_order = list(range(start, start + count))
        return draw(
            st.one_of(st.just(in_order), st.permutations(in_order), st.just([2 * b for b in in_order]))
        )

    return (
        source,
        target,
        blocks(source, 0),
        blocks(target, target_first_block),
        first_token,
        num_tokens,
        target_first_block,
    )


def row_address(layout: KvLayout, block: int, layer: int, plane: int, head: int, slot: int) -> int:
    """Where one token of one head begins, by the layout's definition; ``head`` counts within the rank."""
    row = layer * layout.num_planes + plane
    row = (row * layout.heads_per_rank + head) * layout.block_size + slot
    return block * layout.block_bytes + row * layout.row_bytes


@given(transfers())
def test_no_list_of_copies_is_shorter(
    transfer: tuple[KvLayout, KvLayout, list[int], list[int], int, int, int],
) -> None:
    """Brute force: each token of each head by itself, then neighbours merged as long as there are any."""
    source, target, source_blocks, target_blocks, first_token, num_tokens, target_first_block = transfer
    end = first_token + num_tokens
    if source.block_size == target.block_size:
        end = -(-end // source.block_size) * source.block_size
    copies = plan(
        source,
        target,
        source_blocks,
        target_blocks,
        first_token=first_token,
        num_tokens=num_tokens,
        target_first_block=target_first_block,
    )
    delivered: list[tuple[int, int]] = []  # (target rank, head)
    for pair in copies:
        source_heads = source.heads_of_rank(pair.source_rank)
        target_heads = target.heads_of_rank(pair.target_rank)
        heads = [
            head
            for head in target_heads
            if head in source_heads and (pair.target_rank, head) not in delivered
        ]
        delivered += [(pair.target_rank, head) for head in heads]
        rows = sorted(
            (
                row_address(
                    target,
                    target_blocks[token // target.block_size - target_first_block],
                    layer,
                    plane,
                    target_heads.index(head),
                    token % target.block_size,
                ),
                row_address(
                    source,
                    source_blocks[token // source.block_size],
                    layer,
                    plane,
                    source_heads.index(head),
                    token % source.block_size,
                ),
            )
            for token in range(first_token, end)
            for layer, plane in itertools.product(range(source.num_layers), range(source.num_planes))
            for head in heads
        )
        merged: list[list[int]] = []
        for remote, local in rows:
            if merged and (merged[-1][0] + merged[-1][2], merged[-1][1] + merged[-1][2]) == (local, remote):
                merged[-1][2] += source.row_bytes
            else:
                merged.append([local, remote, source.row_bytes])
        assert pair.copies.tolist() == merged
    assert sorted(delivered) == [
        (rank, head) for rank in range(target.tp_size) for head in target.heads_of_rank(rank)
    ]


@pytest.mark.parametrize(
    ("num_kv_heads", "source_tp", "target_tp", "pairs"),
    [
        (8, 4, 4, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (8, 1, 4, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        (8, 4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (2, 4, 4, [(0, 0), (1, 1), (2, 2), (3, 3)]),  # two ranks hold each head
        (2, 4, 1, [(0, 0), (2, 0)]),  # one of each two is enough
        (2, 4, 2, [(0, 0), (2, 1)]),
        (2, 8, 4, [(0, 0), (2, 1), (4, 2), (6, 3)]),
        (1, 4, 4, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (1, 4, 2, [(0, 0), (2, 1)]),
        (1, 2, 4, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (1, 4, 1, [(0, 0)]),
        (6, 3, 2, [(0, 0), (1, 0), (1, 1), (2, 1)]),
    ],
)
def test_targets_are_spread_over_the_ranks_that_hold_a_head(
    num_kv_heads: int, source_tp: int, target_tp: int, pairs: list[tuple[int, int]]
) -> None:
    copies = plan(
        kv_layout(16, source_tp, num_kv_heads=num_kv_heads),
        kv_layout(16, target_tp, num_kv_heads=num_kv_heads),
        [3],
        [4],
        first_token=0,
        num_tokens=16,
    )
    assert [(pair.source_rank, pair.target_rank) for pair in copies] == pairs


QWEN = KvLayout(num_layers=28, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
LATENT = KvLayout(num_layers=61, num_kv_heads=1, head_dim=576, block_size=16, dtype="bfloat16", num_planes=1)
ONE_LAYER = msgspec.structs.replace(LATENT, num_layers=1)
CONTIGUOUS, EVERY_OTHER, BACKWARDS = range(1, 101), range(1, 201, 2), range(100, 0, -1)


@pytest.mark.parametrize(
    ("layout", "source", "target", "source_blocks", "count"),
    [
        (QWEN, {}, {}, CONTIGUOUS, 1),
        (QWEN, {}, {}, EVERY_OTHER, 100),
        (QWEN, {}, {}, BACKWARDS, 100),
        (QWEN, {}, {}, [*range(1, 51), *range(61, 111)], 2),
        (QWEN, {"tp_size": 4}, {"tp_size": 4}, CONTIGUOUS, 4),
        (QWEN, {"tp_size": 8}, {"tp_size": 16}, CONTIGUOUS, 16),  # one head per rank on both sides
        (QWEN, {}, {"tp_size": 2}, CONTIGUOUS, 2 * 28 * 2 * 100),  # a plane's heads lie together
        (QWEN, {"tp_size": 2}, {}, EVERY_OTHER, 2 * 28 * 2 * 100),
        # Where a block ends on both sides, its last piece and the first one of the next block are neighbours.
        (QWEN, {}, {"block_size": 32}, CONTIGUOUS, 28 * 2 * 8 * 100 - 49),
        (QWEN, {}, {"block_size": 32}, EVERY_OTHER, 28 * 2 * 8 * 100),
        (QWEN, {}, {"block_size": 8}, CONTIGUOUS, 28 * 2 * 8 * 200 - 99),
        (QWEN, {}, {"block_size": 32, "tp_size": 2}, CONTIGUOUS, 28 * 2 * 8 * 100),
        (LATENT, {}, {"tp_size": 4}, CONTIGUOUS, 4),  # every rank gets all
        (LATENT, {"tp_size": 4}, {}, EVERY_OTHER, 100),  # from one rank
        (LATENT, {}, {"block_size": 64}, CONTIGUOUS, 61 * 100 - 24),
        (ONE_LAYER, {}, {"block_size": 64}, CONTIGUOUS, 1),  # a block is nothing but its tokens
    ],
)
def test_number_of_descriptors_for_1600_tokens(
    layout: KvLayout,
    source: dict[str, int],
    target: dict[str, int],
    source_blocks: range | list[int],
    count: int,
) -> None:
    def descriptors(num_tokens: int) -> int:
        ours, theirs = msgspec.structs.replace(layout, **source), msgspec.structs.replace(layout, **target)
        target_blocks = range(1, 1 + 1600 // theirs.block_size)
        copies = plan(ours, theirs, list(source_blocks), list(target_blocks), num_tokens=num_tokens)
        return sum(len(pair.copies) for pair in copies)

    assert descriptors(1600) == count
    assert descriptors(1597) == count  # a partly filled last block costs none


@given(transfers(), st.data())
def test_whole_blocks_of_equal_layouts_are_what_the_general_plan_comes_to(
    transfer: tuple[KvLayout, KvLayout, list[int], list[int], int, int, int], data: st.DataObject
) -> None:
    layout, _, source_blocks, _, first_token, num_tokens, _ = transfer
    first_token -= first_token % layout.block_size
    target_first_block = data.draw(st.integers(0, first_token // layout.block_size))
    target_blocks = [block + 7 for block in source_blocks[target_first_block:]]
    target_blocks = data.draw(st.one_of(st.just(target_blocks), st.permutations(target_blocks)))
    fast = plan(
        layout,
        layout,
        source_blocks,
        target_blocks,
        first_token=first_token,
        num_tokens=num_tokens,
        target_first_block=target_first_block,
    )
    general = layout_planner._converted(
        layout,
        layout,
        np.array(source_blocks),
        np.array(target_blocks),
        first_token,
        first_token + num_tokens,
        target_first_block,
    )
    assert [(pair.source_rank, pair.target_rank, pair.copies.tolist()) for pair in fast] == [
        (pair.source_rank, pair.target_rank, pair.copies.tolist()) for pair in general
    ]


def test_nothing_to_move() -> None:
    assert plan(QWEN, QWEN, [], [], num_tokens=0) == ()
    assert plan(QWEN, QWEN, [1], [2], first_token=16, num_tokens=0) == ()


def test_offsets_count_from_block_0() -> None:
    (pair,) = plan(QWEN, QWEN, [1, 4], [2, 3], num_tokens=32)
    size = QWEN.block_bytes
    assert pair.copies.tolist() == [[size, 2 * size, size], [4 * size, 3 * size, size]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target": msgspec.structs.replace(QWEN, num_layers=36)},
            "num_layers differs: the source has 28, the target 36",
        ),
        (
            {"target": msgspec.structs.replace(QWEN, dtype="float16")},
            "dtype differs: .* bfloat16, the target float16",
        ),
        ({"first_token": 8}, "first_token is 8, must be a multiple of 16: .* of 16 tokens, the target of 32"),
        ({"first_token": -16}, "first_token is -16, must not be negative"),
        ({"num_tokens": -1}, "num_tokens is -1, must not be negative"),
        ({"target_first_block": -1}, "target_first_block is -1, must not be negative"),
        (
            {"source_block_ids": [5, 6, 7]},
            "tokens 0 to 63 do not lie in the 3 source blocks of 16 tokens, which have room for 0 to 47",
        ),
        (
            {"target_block_ids": [1]},
            "tokens 0 to 63 do not lie in the 1 target blocks of 32 tokens, which have room for 0 to 31",
        ),
        ({"target_first_block": 1}, "tokens 0 to 63 do not lie in the 2 target blocks .* room for 32 to 95"),
        ({"source_block_ids": [5, 6, -8, 8]}, "source block id -8 is out of range; .* blocks 0 to 8"),
        ({"source_block_ids": [5, 6, 9, 8]}, "source block id 9 is out of range; .* blocks 0 to 8"),
        ({"target_block_ids": [1, -1]}, "target block id -1 is out of range; .* blocks 0 to 3"),
        ({"target_block_ids": [1, 2**64]}, f"target block id {2**64} is out of range"),
        ({"target_block_ids": [2, 2]}, "target block 2 is written twice"),
    ],
)
def test_impossible_plans_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "source": QWEN,
        "target": msgspec.structs.replace(QWEN, block_size=32),
        "source_block_ids": [5, 6, 7, 8],
        "target_block_ids": [1, 2],
        "first_token": 0,
        "num_tokens": 64,
        **change,
    }
    for side, num_blocks in (("source", 9), ("target", 4)):
        arguments[side] = CacheShape(arguments[side], num_blocks)
    with pytest.raises(ValueError, match=message):
        plan_copies(**arguments)
