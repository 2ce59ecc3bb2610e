"""All blocks of one KV cache: reference counts, the free queue, and the map from hashes to blocks."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.block_hash import BlockHash
from engine.kv_cache.free_queue import Block, FreeBlockQueue

NULL_BLOCK_ID = 0  # stands for "no block" in padded tables; never allocated


class BlockPoolError(RuntimeError):
    """The pool was used in a way that would corrupt it, such as a double free. Nothing was changed."""


class BlockPool:
    """Reference-counted blocks with an LRU prefix cache laid over the free ones.

    A block is either the null block, or in use (``ref_count > 0``), or in the free queue. A free block keeps
    its hash, and can be found by it, until it is allocated anew. Several blocks may hold the same hash: block
    tables only ever grow at their end, so equal blocks computed side by side are not merged.
    """

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` includes the null block. Raises ValueError if no block would be left."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 2: block 0 is the null block")
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue(self._blocks[1:])
        self._by_hash: dict[BlockHash, dict[int, None]] = {}  # insertion-ordered sets of block ids
        self._num_free_cached = 0
        # Net changes since the last take_events(). A hash is never in both.
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    @property
    def num_total(self) -> int:
        """Blocks that can be allocated: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that hold a cached prefix included."""
        return len(self._free)

    @property
    def num_free_cached(self) -> int:
        """Free blocks that hold a reusable prefix."""
        return self._num_free_cached

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold ``block_id``."""
        return self._blocks[block_id].ref_count

    def find(self, block_hash: BlockHash) -> int | None:
        """A block that holds ``block_hash``, in use or free; None if there is none."""
        block_ids = self._by_hash.get(block_hash)
        return next(iter(block_ids)) if block_ids else None

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks from the head of the free queue, evicting what they cached.

        Raises BlockPoolError if fewer are free.
        """
        if count > len(self._free):
            raise BlockPoolError(f"{count} blocks wanted, {len(self._free)} of {self.num_total} are free")
        block_ids = []
        for _ in range(count):
            block = self._free.pop()
            if block.block_hash is not None:
                self._num_free_cached -= 1
                self._forget(block)
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block, taking it out of the free queue if it was there."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block_id == NULL_BLOCK_ID:
                raise BlockPoolError("the null block cannot be referenced")
            if block.ref_count == 0:
                self._free.remove(block)
                if block.block_hash is not None:
                    self._num_free_cached -= 1
            block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference to each block; those without any go back to the free queue.

        A cached block goes to the tail (reused last), an uncached one to the head. Give a sequence's blocks
        last block first, so that of one prefix the tail is evicted before the head. Raises BlockPoolError on
        a block that is already free.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                raise BlockPoolError(f"double free of block {block_id}")
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self._free.prepend(block)
            else:
                self._free.append(block)
                self._num_free_cached += 1

    def store(self, block_id: int, block_hash: BlockHash) -> None:
        """Makes a block in use findable by ``block_hash``: its KV has been computed or has landed."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            raise BlockPoolError(f"block {block_id} is free and cannot be registered")
        if block.block_hash is not None:
            raise BlockPoolError(f"block {block_id} is already registered")
        block.block_hash = block_hash
        block_ids = self._by_hash.setdefault(block_hash, {})
        if not block_ids:
            if block_hash in self._removed:
                del self._removed[block_hash]
            else:
                self._stored[block_hash] = None
        block_ids[block_id] = None

    def discard(self, block_id: int) -> None:
        """Takes a block in use out of the prefix cache, if it is there: its content is not to be trusted."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            raise BlockPoolError(f"block {block_id} is free and cannot be discarded")
        if block.block_hash is not None:
            self._forget(block)

    def snapshot(self) -> list[BlockHash]:
        """Every hash in the prefix cache."""
        return list(self._by_hash)

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has something to report."""
        return bool(self._stored or self._removed)

    def take_events(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Hashes that are (newly in, no longer in) the prefix cache since the last call. Disjoint.

        A hash is stored with its first block and removed with its last.
        """
        events = (tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def check_invariants(self) -> None:
        """Raises AssertionError if the pool's structures contradict each other. O(number of blocks)."""
        queued = list(self._free)
        in_queue = {block.block_id for block in queued}
        assert len(queued) == len(in_queue) == len(self._free), "the free queue's length is wrong"
        null_block = self._blocks[NULL_BLOCK_ID]
        assert null_block.ref_count == 0, "the null block is referenced"
        assert null_block.block_hash is None, "the null block is cached"
        assert NULL_BLOCK_ID not in in_queue, "the null block is in the free queue"
        for block in self._blocks[1:]:
            assert (block.ref_count > 0) != (block.block_id in in_queue), f"{block} is both used and free"
            if block.block_hash is not None:
                assert block.block_id in self._by_hash[block.block_hash], f"{block} is not in the hash map"
        for block_hash, block_ids in self._by_hash.items():
            assert block_ids, "an empty entry is left in the hash map"
            for block_id in block_ids:
                assert self._blocks[block_id].block_hash == block_hash, f"block {block_id} has another hash"
        cached = sum(block.block_hash is not None for block in queued)
        assert cached == self._num_free_cached, (
            f"{cached} free blocks are cached, not {self._num_free_cached}"
        )
        assert not self._stored.keys() & self._removed.keys(), "a hash is both stored and removed"
        assert self._stored.keys() <= self._by_hash.keys(), "a stored hash is not cached"
        assert not self._removed.keys() & self._by_hash.keys(), "a removed hash is cached"

    def _forget(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        block.block_hash = None
        block_ids = self._by_hash[block_hash]
        del block_ids[block.block_id]
        if not block_ids:
            del self._by_hash[block_hash]
            if block_hash in self._stored:
                del self._stored[block_hash]
            else:
                self._removed[block_hash] = None
