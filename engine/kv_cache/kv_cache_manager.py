"""Block tables of sequences, and the prefix cache over their full blocks."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cluster.block_hash import BlockHash, hash_blocks
from cluster.load import KvLoad
from engine.kv_cache.block_pool import BlockPool, BlockPoolError
from engine.sequence import Sequence


class _Owner(enum.Enum):
    SEQUENCE = enum.auto()
    REMOTE_WRITER = enum.auto()  # a peer may write into the blocks behind the cached prefix
    HELD = enum.auto()  # the sequence is gone, its blocks may still be read by a transfer
    QUARANTINED = enum.auto()  # the sequence is gone, a peer may still write into its blocks


@dataclass(slots=True)
class _Allocation:
    block_ids: list[int]
    num_registered: int  # leading blocks that are in the prefix cache, or were offered to it
    num_cached: int  # leading blocks that came out of the prefix cache
    owner: _Owner


class KvCacheManager:
    """Gives blocks to sequences, finds cached prefixes for them, and takes the blocks back.

    Blocks enter the prefix cache by ``register_computed`` only, that is after the step which computed them
    has succeeded or the peer that wrote them has said so: a failed step cannot poison the cache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hash_root: Callable[[str], BlockHash],
        *,
        prefix_caching: bool,
    ) -> None:
        """``num_blocks`` includes the null block. ``hash_root`` maps a cache salt to its chain's root."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1 token")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._hash_root = hash_root
        self._prefix_caching = prefix_caching
        self._allocations: dict[str, _Allocation] = {}
        self._pins: Counter[int] = Counter()  # block ids that steps in flight write into
        self._prefix_queries_total = 0
        self._prefix_hits_total = 0

    # --- what is where -----------------------------------------------------------------------------------

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can ever be allocated."""
        return self._pool.num_total

    def load(self) -> KvLoad:
        """Counts of blocks by what they are used for. A block shared by several is counted once each."""
        counts = dict.fromkeys(_Owner, 0)
        for allocation in self._allocations.values():
            writable = allocation.owner in (_Owner.REMOTE_WRITER, _Owner.QUARANTINED)
            counts[allocation.owner] += len(allocation.block_ids) - (allocation.num_cached if writable else 0)
        return KvLoad(
            blocks_total=self._pool.num_total,
            blocks_free=self._pool.num_free,
            blocks_cached=self._pool.num_free_cached,
            blocks_reserved=counts[_Owner.REMOTE_WRITER],
            blocks_pinned=counts[_Owner.HELD],
            blocks_quarantined=counts[_Owner.QUARANTINED],
            prefix_queries_total=self._prefix_queries_total,
            prefix_hits_total=self._prefix_hits_total,
        )

    def is_known(self, request_id: str) -> bool:
        """Whether ``request_id`` has blocks: in use, held or quarantined."""
        return request_id in self._allocations

    def block_table(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """The blocks of ``request_id`` that cover its first ``num_tokens`` positions."""
        return tuple(self._allocations[request_id].block_ids[: self.blocks_for(num_tokens)])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions need."""
        return -(-num_tokens // self.block_size)

    # --- prefix cache --------------------------------------------------------------------------------------

    def hash_root(self, cache_salt: str) -> BlockHash:
        """The parent hash of the first block of a sequence with this salt."""
        return self._hash_root(cache_salt)

    def find_cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix of ``sequence``, as block ids. They are found, not yet referenced.

        At most ``(num_tokens - 1) // block_size`` blocks: one token at least must be computed for its logits.
        """
        limit = self._lookup_limit(sequence)
        self._extend_hashes(sequence, limit)
        block_ids: list[int] = []
        for block_hash in sequence.block_hashes[:limit]:
            block_id = self._pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def count_lookup(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Counts a request that was admitted for the first time, for the prefix cache's hit rate."""
        self._prefix_queries_total += num_tokens
        self._prefix_hits_total += num_cached_tokens

    def refresh_cache_hit_hint(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` that are probably cached. Moves on from the last answer: O(1) amortised."""
        limit = self._lookup_limit(sequence)
        self._extend_hashes(sequence, limit)
        hashes, hint = sequence.block_hashes, min(sequence.cache_hit_hint, limit)
        while hint > 0 and self._pool.find(hashes[hint - 1]) is None:
            hint -= 1
        while hint < limit and self._pool.find(hashes[hint]) is not None:
            hint += 1
        sequence.cache_hit_hint = hint
        return hint * self.block_size

    def register_computed(self, sequence: Sequence) -> None:
        """Puts the full blocks below ``num_computed_tokens`` into the prefix cache."""
        allocation = self._allocations[sequence.request_id]
        num_full = sequence.num_computed_tokens // self.block_size if self._prefix_caching else 0
        self._extend_hashes(sequence, num_full)
        for index in range(allocation.num_registered, num_full):
            self._pool.store(allocation.block_ids[index], sequence.block_hashes[index])
        allocation.num_registered = max(allocation.num_registered, num_full)

    def discard_cached(self, request_id: str) -> None:
        """Takes all blocks of a sequence out of the prefix cache: its KV turned out to be unusable."""
        for block_id in self._allocations[request_id].block_ids:
            self._pool.discard(block_id)

    def snapshot(self) -> list[BlockHash]:
        """Every hash in the prefix cache."""
        return self._pool.snapshot()

    @property
    def has_events(self) -> bool:
        """Whether the prefix cache has changed since ``take_events``."""
        return self._pool.has_events

    def take_events(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Hashes (stored, removed) since the last call, net of each other."""
        return self._pool.take_events()

    # --- allocation ----------------------------------------------------------------------------------------

    def allocate(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        cached_block_ids: Iterable[int] = (),
        keep_free: int = 0,
        for_remote_writer: bool = False,
    ) -> bool:
        """Makes the block table of a sequence that has none cover ``num_tokens`` positions.

        ``cached_block_ids`` come first in it. Returns False, and changes nothing, if fewer than ``keep_free``
        blocks would stay free.
        """
        request_id, cached = sequence.request_id, list(cached_block_ids)
        if request_id in self._allocations:
            raise BlockPoolError(f"request {request_id} already has blocks")
        num_new = self.blocks_for(num_tokens) - len(cached)
        # A cached block nobody uses is in the free queue: taking it uses up free capacity as well.
        num_taken = num_new + sum(self._pool.ref_count(block_id) == 0 for block_id in cached)
        if num_taken + keep_free > self._pool.num_free:
            return False
        self._pool.touch(cached)  # before allocate, which might evict them
        self._allocations[request_id] = _Allocation(
            block_ids=cached + self._pool.allocate(num_new),
            num_registered=len(cached),
            num_cached=len(cached),
            owner=_Owner.REMOTE_WRITER if for_remote_writer else _Owner.SEQUENCE,
        )
        return True

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Makes a block table cover ``num_tokens`` positions. Returns False if there is no room."""
        block_ids = self._allocations[request_id].block_ids
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            block_ids.extend(self._pool.allocate(missing))
        return True

    def pin(self, block_ids: SequenceOf[int], start: int) -> None:
        """Keeps what a step writes out of reuse until ``unpin``, even if the sequence ends before the step.

        It writes into a sequence's blocks ``block_ids`` from position ``start`` on.
        """
        written = block_ids[start // self.block_size :]
        self._pool.touch(written)
        self._pins.update(written)

    def unpin(self, block_ids: SequenceOf[int], start: int) -> None:
        """The step is over that was given to ``pin``."""
        written = block_ids[start // self.block_size :]
        self._pins.subtract(written)
        self._pins = +self._pins  # without the zeros
        self._pool.free(reversed(written))

    def remote_writer_done(self, request_id: str) -> None:
        """The peer that wrote into these blocks has finished; they are an ordinary sequence's from now on."""
        self._allocations[request_id].owner = _Owner.SEQUENCE

    def free(self, request_id: str) -> None:
        """Drops a sequence's references, last block first. Raises BlockPoolError if it has none."""
        allocation = self._allocations.pop(request_id, None)
        if allocation is None:
            raise BlockPoolError(f"double free: request {request_id} has no blocks")
        self._pool.free(reversed(allocation.block_ids))

    def hold(self, request_id: str) -> None:
        """The sequence is gone, but its blocks stay as they are until ``release``."""
        self._allocations[request_id].owner = _Owner.HELD

    def release(self, request_id: str) -> bool:
        """Frees held blocks. Returns whether there were any."""
        return self._release(request_id, _Owner.HELD)

    def quarantine(self, request_id: str) -> None:
        """The sequence is gone, but a peer may still write into its blocks: none is reused for now.

        Those in the prefix cache, found there or landed, into which no peer writes any more, are freed.
        """
        allocation = self._allocations[request_id]
        num_safe = allocation.num_registered
        self._pool.free(reversed(allocation.block_ids[:num_safe]))
        self._allocations[request_id] = _Allocation(
            block_ids=allocation.block_ids[num_safe:],
            num_registered=0,
            num_cached=0,
            owner=_Owner.QUARANTINED,
        )

    def release_quarantined(self, request_id: str) -> bool:
        """Frees quarantined blocks: the writer is done or fenced. Returns whether there were any."""
        return self._release(request_id, _Owner.QUARANTINED)

    def check_invariants(self, sequences: Iterable[Sequence] = ()) -> None:
        """Raises AssertionError if tables, pool and ``sequences`` contradict each other."""
        self._pool.check_invariants()
        references: dict[int, int] = dict(self._pins)
        for request_id, allocation in self._allocations.items():
            assert len(set(allocation.block_ids)) == len(allocation.block_ids), f"{request_id}: block twice"
            assert allocation.num_cached <= allocation.num_registered <= len(allocation.block_ids)
            for block_id in allocation.block_ids:
                references[block_id] = references.get(block_id, 0) + 1
        for block_id in range(self._pool.num_total + 1):
            assert self._pool.ref_count(block_id) == references.get(block_id, 0), f"block {block_id} leaked"
        for sequence in sequences:
            allocated = self._allocations.get(sequence.request_id)
            num_blocks = len(allocated.block_ids) if allocated else 0
            assert num_blocks >= self.blocks_for(sequence.num_computed_tokens), f"{sequence}: table too short"
            assert allocated is None or allocated.num_registered * self.block_size <= max(
                sequence.num_computed_tokens, allocated.num_cached * self.block_size
            ), f"{sequence}: uncomputed blocks are registered"

    def _release(self, request_id: str, owner: _Owner) -> bool:
        allocation = self._allocations.get(request_id)
        if allocation is None or allocation.owner is not owner:
            return False
        self.free(request_id)
        return True

    def _lookup_limit(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self.block_size if self._prefix_caching else 0

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        known = len(sequence.block_hashes)
        if known >= num_blocks:
            return
        parent = sequence.block_hashes[-1] if known else sequence.hash_root
        tokens = sequence.all_token_ids[: num_blocks * self.block_size]
        sequence.block_hashes += hash_blocks(tokens, self.block_size, parent, start_block=known)
