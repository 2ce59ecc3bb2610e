"""Turns pairs of block ids into the fewest copies: what a transport posts for one write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_ADDRESS_END = 1 << 62  # ids come from peers; a product beyond int64 would wrap round to a valid address


class BlockCopy(NamedTuple):
    """One contiguous copy from local to remote memory."""

    local_address: int
    remote_address: int
    num_bytes: int


def check_block_ids(block_ids: Sequence[int], num_blocks: int, *, side: str) -> None:
    """Raise ``ValueError`` if a block id lies outside a cache of ``num_blocks`` blocks.

    ``side`` names the cache in the message, e.g. ``"local"``.
    """
    for position, block_id in enumerate(block_ids):
        if not 0 <= block_id < num_blocks:
            raise ValueError(
                f"{side} block id {block_id} at position {position} is out of range; "
                f"that cache has blocks 0 to {num_blocks - 1}"
            )


def check_remote_copies(copies: Sequence[BlockCopy], num_blocks: int, *, block_bytes: int) -> None:
    """Raise ``ValueError`` if a copy ends beyond a cache of ``num_blocks`` blocks at remote address 0."""
    for copy in copies:
        if copy.remote_address + copy.num_bytes > num_blocks * block_bytes:
            last_block = (copy.remote_address + copy.num_bytes) // block_bytes - 1
            raise ValueError(
                f"remote block id {last_block} is out of range; that cache has blocks 0 to {num_blocks - 1}"
            )


def plan_block_copies(
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
    *,
    block_bytes: int,
    local_base: int,
    remote_base: int,
) -> list[BlockCopy]:
    """Copies that move ``local_block_ids[i]`` to ``remote_block_ids[i]`` for every i.

    Both caches are block-major, so block ``b`` starts ``b * block_bytes`` bytes after its base. Pairs are
    ordered by remote block, and runs that are contiguous on both sides become one copy. The list is the
    shortest one possible: every split is at a pair that does not follow its predecessor on both sides.
    Between caches of different layouts, ``kv_transfer.layout_planner`` plans.

    Raises ``ValueError`` for unequal lengths, an impossible id, a block size below 1 byte, or a remote block
    that is written twice (its content would depend on the order of the copies).
    """
    if len(local_block_ids) != len(remote_block_ids):
        raise ValueError(
            f"blocks are copied pairwise, got {len(local_block_ids)} local and "
            f"{len(remote_block_ids)} remote block ids"
        )
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    local = block_id_array(local_block_ids, block_bytes, side="local")
    remote = block_id_array(remote_block_ids, block_bytes, side="remote", written=True)
    return block_copies(
        merge_copies(
            local_base + local * block_bytes,
            remote_base + remote * block_bytes,
            np.full_like(remote, block_bytes),
        )
    )


def block_id_array(block_ids: Sequence[int], block_bytes: int, *, side: str, written: bool = False) -> Int64s:
    """Block ids as an array. ``side`` names them in messages.

    Raises ``ValueError`` for a negative id, for one whose block would end beyond every address, and where the
    blocks are ``written`` for one that comes twice.
    """
    if len(block_ids):
        lowest, highest = min(block_ids), max(block_ids)
        if lowest < 0:
            raise ValueError(f"block ids must not be negative, got {side} {lowest}")
        if highest >= _ADDRESS_END // block_bytes:
            raise ValueError(
                f"{side} block id {highest} is out of range; "
                f"no memory has so many blocks of {block_bytes} bytes"
            )
    ids = np.array(block_ids, dtype=np.int64)
    if written:
        in_order = np.sort(ids)
        twice = in_order[1:][in_order[1:] == in_order[:-1]]
        if twice.size:
            raise ValueError(f"{side} block {twice[0]} is written twice in one transfer")
    return ids


def merge_copies(local: Int64s, remote: Int64s, num_bytes: Int64s) -> Int64s:
    """The fewest copies that do what these do: ``[m, 3]``, the fields of ``BlockCopy``, by remote address.

    ``local``, ``remote`` and ``num_bytes`` are ``[n]``, one element per copy, in any order; no two may write
    the same byte. Each copy of the result begins where the memory before it on one side is not copied to the
    memory before it on the other, so no list that moves the same bytes is shorter.
    """
    if not remote.size:
        return np.empty((0, 3), dtype=np.int64)
    order = np.argsort(remote)
    local, remote, num_bytes = local[order], remote[order], num_bytes[order]
    follows = (local[1:] == local[:-1] + num_bytes[:-1]) & (remote[1:] == remote[:-1] + num_bytes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return np.column_stack((local[starts], remote[starts], np.add.reduceat(num_bytes, starts)))


def block_copies(copies: Int64s) -> list[BlockCopy]:
    """The rows of ``[n, 3]`` as objects."""
    return [BlockCopy._make(row) for row in copies.tolist()]
