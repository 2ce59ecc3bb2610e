"""Which bytes a transfer moves: from block lists of two KV caches to the fewest copies.

A plan is a pure function of both layouts and the block lists. The usual case is that the layouts are equal:
then whole blocks are copied, and runs that are contiguous on both sides become one copy. Block sizes and
tensor parallel (TP) sizes may differ.

Conventions are the field's. A cache is sharded over ranks by heads, and a head that several ranks hold is
the same on all of them (``cluster.kv_layout``). vLLM's NixlConnector converts between TP sizes in the same
way: it cuts a rank's heads out of the other side's block, which needs heads before tokens within a block
(HND) [1]. A copy becomes one NIXL descriptor per side, ``(address, length, device)`` [2]; the cost of a
transfer grows with their number, so that the planner looks for the fewest.

What that number is for each pair of ranks, with L layers, P planes and H heads in common:

- block size and heads per rank equal: one for each run of blocks that is contiguous on both sides;
- block size equal: at most L * P per block;
- otherwise: at most L * P * H per stretch of tokens without a block boundary on either side.

[1] NixlConnector in vllm/distributed/kv_transfer/kv_connector/v1/;
    https://docs.vllm.ai/en/stable/features/nixl_connector_compatibility/
[2] nixl_agent.get_xfer_descs in NIXL's Python API
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cluster.kv_layout import KvLayout, why_not_convertible

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One side of a transfer: every rank has a cache of ``num_blocks`` blocks of ``layout``."""

    layout: KvLayout
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class RankCopies:
    """What one source rank writes into one target rank.

    ``copies`` is ``[n, 3]``, read-only: source offset, target offset and number of bytes. Offsets count from
    each rank's block 0. They are ordered by target offset, do not overlap there, and no two of them could be
    one.
    """

    source_rank: int
    target_rank: int
    copies: Int64s


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Runs of tokens that lie in one block on either side: ``[n]`` each."""

    source_blocks: Int64s
    source_slots: Int64s  # of the first token, within its block
    target_blocks: Int64s
    target_slots: Int64s
    num_tokens: Int64s


def plan_copies(
    source: CacheShape,
    target: CacheShape,
    source_block_ids: Sequence[int],
    target_block_ids: Sequence[int],
    *,
    first_token: int,
    num_tokens: int,
    target_first_block: int = 0,
) -> tuple[RankCopies, ...]:
    """Copies that move tokens ``first_token`` to ``first_token + num_tokens - 1`` of one sequence.

    ``source_block_ids[i]`` holds logical block ``i`` of the sequence, in blocks of the source's size.
    ``target_block_ids[i]`` takes logical block ``target_first_block + i``, in blocks of the target's size, as
    in ``cluster.messages.Prefill``. All ranks of a side use the same block ids.

    Any two block sizes will do. ``first_token`` must be where a block could begin, a multiple of the block
    sizes' greatest common divisor; the end is free, for the last block of a prompt is partly filled. Exactly
    these tokens are written, with one exception: where both block sizes are equal, the last block is copied
    whole, because it then merges with its neighbours. What follows the tokens in it is whatever the source
    has there.

    The result is ordered by target rank, then source rank, and has one element for each pair of ranks with
    something to move. Each target rank gets each of its heads exactly once. Where several source ranks hold
    a head, its target ranks are spread evenly over them in the order of their ranks, so that equal TP sizes
    pair rank ``r`` with rank ``r``.

    Raises ``ValueError`` if the layouts are not convertible, for a range that is misaligned or lies outside
    the blocks, a block id out of range, or a target block that is named twice.
    """
    if reason := why_not_convertible(source.layout, target.layout):
        raise ValueError(f"KV blocks cannot be converted: {reason}")
    _check_range(source.layout, target.layout, first_token, num_tokens, target_first_block)
    source_blocks = _block_ids(source_block_ids, source.num_blocks, side="source")
    target_blocks = _block_ids(target_block_ids, target.num_blocks, side="target")
    _check_written_once(target_blocks)
    end = first_token + num_tokens
    _check_covered(first_token, end, 0, source_blocks, source.layout.block_size, side="source")
    _check_covered(
        first_token, end, target_first_block, target_blocks, target.layout.block_size, side="target"
    )
    if num_tokens == 0:
        return ()
    if source.layout == target.layout:
        size = source.layout.block_size
        first, last = first_token // size, -(-end // size)
        return _whole_blocks(
            source.layout,
            source_blocks[first:last],
            target_blocks[first - target_first_block : last - target_first_block],
        )
    return _converted(
        source.layout, target.layout, source_blocks, target_blocks, first_token, end, target_first_block
    )


def _whole_blocks(layout: KvLayout, source_blocks: Int64s, target_blocks: Int64s) -> tuple[RankCopies, ...]:
    """Between equal layouts: the same copies for every rank, what ``_converted`` comes to as well."""
    size = layout.block_bytes
    copies = _merge(source_blocks * size, target_blocks * size, np.full_like(target_blocks, size))
    return tuple(RankCopies(rank, rank, copies) for rank in range(layout.tp_size))


def _converted(
    source: KvLayout,
    target: KvLayout,
    source_blocks: Int64s,
    target_blocks: Int64s,
    first_token: int,
    end: int,
    target_first_block: int,
) -> tuple[RankCopies, ...]:
    """Between any two layouts."""
    if source.block_size == target.block_size:
        end = -(-end // source.block_size) * source.block_size
    starts = _starts(first_token, end, source.block_size, target.block_size)
    stretches = _Stretches(
        source_blocks=source_blocks[starts // source.block_size],
        source_slots=starts % source.block_size,
        target_blocks=target_blocks[starts // target.block_size - target_first_block],
        target_slots=starts % target.block_size,
        num_tokens=np.diff(starts, append=end),
    )
    return tuple(
        RankCopies(
            source_rank, target_rank, _copies(source, target, source_rank, target_rank, heads, stretches)
        )
        for target_rank in range(target.tp_size)
        for source_rank, heads in _sources_of(source, target, target_rank)
    )


def _block_ids(block_ids: Sequence[int], num_blocks: int, *, side: str) -> Int64s:
    if len(block_ids) and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        wrong = next(block_id for block_id in block_ids if not 0 <= block_id < num_blocks)
        raise ValueError(
            f"{side} block id {wrong} is out of range; that cache has blocks 0 to {num_blocks - 1}"
        )
    return np.array(block_ids, dtype=np.int64)


def _check_written_once(target_blocks: Int64s) -> None:
    """The content of a block that is written twice would depend on the order of the copies."""
    in_order = np.sort(target_blocks)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if twice.size:
        raise ValueError(f"target block {twice[0]} is written twice in one transfer")


def _check_range(
    source: KvLayout, target: KvLayout, first_token: int, num_tokens: int, target_first_block: int
) -> None:
    for name, value in (
        ("first_token", first_token),
        ("num_tokens", num_tokens),
        ("target_first_block", target_first_block),
    ):
        if value < 0:
            raise ValueError(f"{name} is {value}, must not be negative")
    step = math.gcd(source.block_size, target.block_size)
    if first_token % step:
        raise ValueError(
            f"first_token is {first_token}, must be a multiple of {step}: the source has blocks of "
            f"{source.block_size} tokens, the target of {target.block_size}"
        )


def _check_covered(
    first_token: int, end: int, first_block: int, blocks: Int64s, block_size: int, *, side: str
) -> None:
    covered = range(first_block * block_size, (first_block + len(blocks)) * block_size)
    if first_token < end and (first_token < covered.start or end > covered.stop):
        raise ValueError(
            f"tokens {first_token} to {end - 1} do not lie in the {len(blocks)} {side} blocks of "
            f"{block_size} tokens, which have room for {covered.start} to {covered.stop - 1}"
        )


def _starts(first_token: int, end: int, *block_sizes: int) -> Int64s:
    """First tokens of the stretches of ``[first_token, end)`` that no block boundary of any size cuts."""
    boundaries = [np.arange((first_token // size + 1) * size, end, size) for size in block_sizes]
    return np.unique(np.concatenate(([first_token], *boundaries)))


def _sources_of(source: KvLayout, target: KvLayout, target_rank: int) -> list[tuple[int, list[int]]]:
    """Which source rank delivers which of a target rank's heads: ``(source rank, consecutive heads)``."""
    # The rank's place among those that want the same heads, and the same place among those that have them.
    replica = target_rank % target.num_head_replicas
    supplier = replica * source.num_head_replicas // target.num_head_replicas

    def source_rank(head: int) -> int:
        return head // source.heads_per_rank * source.num_head_replicas + supplier

    return [(rank, list(heads)) for rank, heads in groupby(target.heads_of_rank(target_rank), source_rank)]


def _copies(
    source: KvLayout,
    target: KvLayout,
    source_rank: int,
    target_rank: int,
    heads: Sequence[int],
    stretches: _Stretches,
) -> Int64s:
    """Copies of ``heads``, which are consecutive in both ranks' caches."""
    row = source.row_bytes
    source_head = heads[0] - source.heads_of_rank(source_rank).start
    target_head = heads[0] - target.heads_of_rank(target_rank).start
    # Offsets of one stretch's pieces from the token's row in the block's first layer, plane and head.
    source_pieces = np.array([source_head * source.block_size * row], dtype=np.int64)
    target_pieces = np.array([target_head * target.block_size * row], dtype=np.int64)
    # An axis along which a whole block's pieces lie end to end on both sides makes pieces longer, not more:
    # _merge would find that too, but from a thousand times as many pieces. Different block sizes never
    # get there: their strides are too long.
    piece_bytes = min(source.block_size, target.block_size) * row
    times_longer = 1
    source_stride, target_stride = source.block_size * row, target.block_size * row
    for extent, source_extent, target_extent in (
        (len(heads), source.heads_per_rank, target.heads_per_rank),
        (source.num_planes, source.num_planes, target.num_planes),
        (source.num_layers, source.num_layers, target.num_layers),
    ):
        if source_stride == target_stride == piece_bytes * times_longer:
            times_longer *= extent
        else:
            source_pieces = np.add.outer(np.arange(extent) * source_stride, source_pieces).ravel()
            target_pieces = np.add.outer(np.arange(extent) * target_stride, target_pieces).ravel()
        source_stride *= source_extent
        target_stride *= target_extent
    source_starts = stretches.source_blocks * source.block_bytes + stretches.source_slots * row
    target_starts = stretches.target_blocks * target.block_bytes + stretches.target_slots * row
    return _merge(
        np.add.outer(source_starts, source_pieces).ravel(),
        np.add.outer(target_starts, target_pieces).ravel(),
        np.repeat(stretches.num_tokens * row * times_longer, len(source_pieces)),
    )


def _merge(source: Int64s, target: Int64s, num_bytes: Int64s) -> Int64s:
    """The fewest copies that do what these do: ``[m, 3]`` as in ``RankCopies``.

    ``source``, ``target`` (offsets) and ``num_bytes`` are ``[n]``, one element per copy, in any order; no two
    may write the same byte. Each copy of the result begins where the memory before it on one side is not
    copied to the memory before it on the other, so no list that moves the same bytes is shorter.
    """
    order = np.argsort(target)
    source, target, num_bytes = source[order], target[order], num_bytes[order]
    follows = (source[1:] == source[:-1] + num_bytes[:-1]) & (target[1:] == target[:-1] + num_bytes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    copies = np.column_stack((source[starts], target[starts], np.add.reduceat(num_bytes, starts)))
    copies.setflags(write=False)
    return copies
