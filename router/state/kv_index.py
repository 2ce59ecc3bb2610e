"""Which worker holds which KV block: block hash -> set of workers, kept current by the workers' KV events.

Workers are slots, small integers that the caller gives out, and a set of workers is an int whose bit ``slot``
is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cluster.block_hash import BlockHash

_MAX_SHARED_SETS = 65_536


class KvIndex:
    """Block hashes of all workers, bounded in the number of distinct hashes.

    When the bound is reached the hash that has been known longest is forgotten: the router then merely
    underestimates a prefix hit, which costs time but never correctness.
    """

    def __init__(self, max_blocks: int = 1_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}, must be at least 1")
        self.max_blocks = max_blocks
        self.num_evicted = 0  # hashes forgotten because the index was full, since start
        self._holders: dict[BlockHash, int] = {}
        # Almost all hashes have one of a few sets of holders: equal ones share one int. That only saves
        # memory, so the table may be emptied at any time.
        self._shared_sets: dict[int, int] = {}
        self._blocks: dict[int, set[BlockHash]] = {}  # by slot

    def __len__(self) -> int:
        return len(self._holders)

    def num_blocks(self, slot: int) -> int:
        """How many known blocks the worker holds."""
        return len(self._blocks.get(slot, ()))

    def holders(self, block: BlockHash) -> int:
        """The workers that hold ``block``, as a set of bits."""
        return self._holders.get(block, 0)

    def store(self, slot: int, blocks: Iterable[BlockHash]) -> None:
        """Note that the worker now holds ``blocks``."""
        held = self._blocks.setdefault(slot, set())
        bit = 1 << slot
        for block in blocks:
            if block in held:
                continue
            holders = self._holders.get(block, 0)
            if not holders and len(self._holders) >= self.max_blocks:
                self._evict_oldest()
            self._set(block, holders | bit)
            held.add(block)

    def remove(self, slot: int, blocks: Iterable[BlockHash]) -> None:
        """Note that the worker no longer holds ``blocks``. Unknown blocks are ignored."""
        held = self._blocks.get(slot, set())
        bit = 1 << slot
        for block in blocks:
            if block not in held:
                continue
            held.remove(block)
            rest = self._holders[block] & ~bit
            if rest:
                self._set(block, rest)
            else:
                del self._holders[block]

    def replace(self, slot: int, blocks: Iterable[BlockHash]) -> None:
        """Make ``blocks`` the whole of what the worker holds."""
        wanted = dict.fromkeys(blocks)
        self.remove(slot, self._blocks.get(slot, set()) - wanted.keys())
        self.store(slot, wanted)

    def remove_worker(self, slot: int) -> None:
        """Forget all blocks of the worker. The work grows with its blocks, not with the index."""
        self.replace(slot, ())
        self._blocks.pop(slot, None)

    def match(self, chain: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """How many of the leading blocks of a prompt's hash chain each worker holds, the longest hits first.

        Returns ``(number of blocks, set of workers)`` with disjoint sets; workers without the first block
        are in none.

        A worker's cache evicts a chain from its end, so one that holds a block holds those before it. The
        lookups rely on that: O(log n) for a chain of n blocks that is held whole or not at all, and as much
        again for each further length at which a worker's hit ends, never more than n. A worker with a hole in
        what it holds is given at least the length up to the first hole; what is given ends with a block that
        it holds, followed by one that it lacks. The worker computes what is missing, whatever is said here.

        Where the bound made the index forget blocks, those are the first of a chain, as they came first: it
        then counts as unknown.
        """
        if not chain:
            return []
        hits: list[tuple[int, int]] = []
        known, step, last = 0, 1, len(chain) - 1
        following = self.holders(chain[0])
        while following:  # all of them hold block `known`
            if known == last:
                hits.append((len(chain), following))
                break
            position = min(known + step, last)
            still = following & self.holders(chain[position])
            self._split(chain, known, position, following ^ still, hits)
            following, known, step = still, position, step * 2
        return sorted(hits, reverse=True)

    def _split(
        self, chain: Sequence[BlockHash], low: int, high: int, workers: int, hits: list[tuple[int, int]]
    ) -> None:
        """Find where the hits of ``workers`` end, which all hold block ``low`` and all lack ``high``."""
        if not workers:
            return
        if high - low == 1:
            hits.append((high, workers))
            return
        middle = (low + high) // 2
        held = workers & self.holders(chain[middle])
        self._split(chain, middle, high, held, hits)
        self._split(chain, low, middle, workers ^ held, hits)

    def check_invariants(self) -> None:
        """Raise AssertionError if the two directions disagree (used by tests)."""
        held: dict[int, set[BlockHash]] = {}
        for block, holders in self._holders.items():
            assert holders
            for slot in slots_of(holders):
                held.setdefault(slot, set()).add(block)
        assert held == {slot: blocks for slot, blocks in self._blocks.items() if blocks}
        assert len(self._holders) <= self.max_blocks

    def _set(self, block: BlockHash, holders: int) -> None:
        if len(self._shared_sets) >= _MAX_SHARED_SETS:
            self._shared_sets.clear()
        self._holders[block] = self._shared_sets.setdefault(holders, holders)

    def _evict_oldest(self) -> None:
        block = next(iter(self._holders))
        for slot in slots_of(self._holders.pop(block)):
            self._blocks[slot].remove(block)
        self.num_evicted += 1


def slots_of(workers: int) -> Iterator[int]:
    """The slots in a set of workers, ascending."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
