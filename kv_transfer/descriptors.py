"""Turns pairs of block ids into the fewest copies: what a transport posts for one write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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

    Raises ``ValueError`` for unequal lengths, a negative id, a block size below 1 byte, or a remote block
    that is written twice (its content would depend on the order of the copies).
    """
    if len(local_block_ids) != len(remote_block_ids):
        raise ValueError(
            f"blocks are copied pairwise, got {len(local_block_ids)} local and "
            f"{len(remote_block_ids)} remote block ids"
        )
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    copies: list[BlockCopy] = []
    run_local = run_remote = run_length = 0
    previous_remote = -1
    for remote, local in sorted(zip(remote_block_ids, local_block_ids, strict=True)):
        if remote < 0 or local < 0:
            raise ValueError(f"block ids must not be negative, got local {local} and remote {remote}")
        if remote == previous_remote:
            raise ValueError(f"remote block {remote} is written twice in one transfer")
        previous_remote = remote
        if run_length and remote == run_remote + run_length and local == run_local + run_length:
            run_length += 1
            continue
        if run_length:
            copies.append(_copy(run_local, run_remote, run_length, block_bytes, local_base, remote_base))
        run_local, run_remote, run_length = local, remote, 1
    if run_length:
        copies.append(_copy(run_local, run_remote, run_length, block_bytes, local_base, remote_base))
    return copies


def _copy(
    local: int, remote: int, length: int, block_bytes: int, local_base: int, remote_base: int
) -> BlockCopy:
    return BlockCopy(
        local_base + local * block_bytes, remote_base + remote * block_bytes, length * block_bytes
    )
