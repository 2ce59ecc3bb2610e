"""Checks that the bytes of a KV block are the ones its writer meant: xxh3 on both sides of a transfer.

A checksum finds what a completed write should exclude: a transport that reports completion too early, memory
that was reused before its reader was done, a broken link. XXH3 is the 64-bit variant of xxHash, of which one
core computes several GB/s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import xxhash

from cluster.sequence_spec import RequestKey

VerifyMode = Literal["off", "sampled", "all"]

SAMPLED_SHARE = 16  # one of so many blocks


class BlockVerifier:
    """Computes checksums of blocks of one KV cache in host memory, in a thread of its own.

    The memory of ``num_blocks * block_bytes`` bytes at ``base_address`` must stay valid until ``close``.
    """

    def __init__(
        self, mode: VerifyMode, *, base_address: int, block_bytes: int, num_blocks: int, memory: str = "DRAM"
    ) -> None:
        """Raises ValueError for an unknown mode, and for memory that the CPU cannot read."""
        if mode not in ("off", "sampled", "all"):
            raise ValueError(f"verify is {mode!r}, must be off, sampled or all")
        if mode != "off" and memory != "DRAM":
            raise ValueError(
                f"verify is {mode}, but the KV cache is in {memory}: only host memory is checked"
            )
        self.mode: VerifyMode = mode
        self._base_address = base_address
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-checksums")

    def choose(self, key: RequestKey, num_blocks: int) -> list[int]:
        """Which of a handoff's ``num_blocks`` blocks are checked, as indexes in rising order.

        ``sampled`` takes each with a probability of 1/16, by a hash, and always the last one: it is written
        last, so that a seal which overtakes its data shows there.
        """
        if self.mode == "off":
            return []
        if self.mode == "all":
            return list(range(num_blocks))
        seed = xxhash.xxh3_64_intdigest(str(key).encode())
        return [
            index
            for index in range(num_blocks)
            if index == num_blocks - 1
            or xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), seed=seed) % SAMPLED_SHARE == 0
        ]

    def checksums(self, block_ids: Sequence[int]) -> Future[list[int]]:
        """XXH3 of each block's bytes, in order. Raises ValueError for an id out of range."""
        for block_id in block_ids:
            if not 0 <= block_id < self._num_blocks:
                raise ValueError(f"block id {block_id} is out of range: there are {self._num_blocks} blocks")
        return self._executor.submit(lambda: [self._checksum(block_id) for block_id in block_ids])

    def close(self) -> None:
        """Finish what was asked for and end the thread."""
        self._executor.shutdown()

    def _checksum(self, block_id: int) -> int:
        address = self._base_address + block_id * self._block_bytes
        block = (ctypes.c_char * self._block_bytes).from_address(address)
        return xxhash.xxh3_64_intdigest(block)
