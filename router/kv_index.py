"""Which worker holds which KV block: block hash -> workers, kept current by the workers' KV events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cluster.block_hash import BlockHash


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
        # The values are tuples of the sorted worker ids, interned per combination, because almost all hashes
        # have one of a few combinations, and a set per hash costs 200 bytes.
        self._workers: dict[BlockHash, tuple[str, ...]] = {}
        self._combinations: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._num_blocks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def num_blocks(self, worker: str) -> int:
        """How many known blocks ``worker`` holds."""
        return self._num_blocks.get(worker, 0)

    def workers(self, block: BlockHash) -> tuple[str, ...]:
        """The workers that hold ``block``, sorted."""
        return self._workers.get(block, ())

    def store(self, worker: str, blocks: Iterable[BlockHash]) -> None:
        """Note that ``worker`` now holds ``blocks``."""
        for block in blocks:
            holders = self._workers.get(block)
            if holders is None:
                if len(self._workers) >= self.max_blocks:
                    self._evict_oldest()
                self._set(block, (worker,))
            elif worker in holders:
                continue
            else:
                self._set(block, tuple(sorted((*holders, worker))))
            self._num_blocks[worker] = self._num_blocks.get(worker, 0) + 1

    def remove(self, worker: str, blocks: Iterable[BlockHash]) -> None:
        """Note that ``worker`` no longer holds ``blocks``. Unknown blocks are ignored."""
        for block in blocks:
            holders = self._workers.get(block)
            if holders is None or worker not in holders:
                continue
            self._num_blocks[worker] -= 1
            rest = tuple(name for name in holders if name != worker)
            if rest:
                self._set(block, rest)
            else:
                del self._workers[block]

    def replace(self, worker: str, blocks: Iterable[BlockHash]) -> None:
        """Make ``blocks`` the whole of what ``worker`` holds."""
        wanted = set(blocks)
        held = [block for block, holders in self._workers.items() if worker in holders]
        self.remove(worker, (block for block in held if block not in wanted))
        self.store(worker, wanted)

    def remove_worker(self, worker: str) -> None:
        """Forget all blocks of ``worker``."""
        self.replace(worker, ())
        self._num_blocks.pop(worker, None)
        self._combinations = {c: c for c in self._combinations if worker not in c}

    def match(self, blocks: Sequence[BlockHash], workers: Iterable[str]) -> dict[str, int]:
        """For each of ``workers``, how many of the leading ``blocks`` it holds without a hole."""
        lengths = dict.fromkeys(workers, 0)
        following = set(lengths)
        for position, block in enumerate(blocks):
            following.intersection_update(self._workers.get(block, ()))
            if not following:
                break
            for worker in following:
                lengths[worker] = position + 1
        return lengths

    def check_invariants(self) -> None:
        """Raise AssertionError if the counters disagree with the map (used by tests)."""
        counts: dict[str, int] = {}
        for holders in self._workers.values():
            assert holders == tuple(sorted(set(holders)))
            assert holders
            for worker in holders:
                counts[worker] = counts.get(worker, 0) + 1
        assert counts == {worker: count for worker, count in self._num_blocks.items() if count}
        assert len(self._workers) <= self.max_blocks

    def snapshot(self) -> Mapping[str, int]:
        """Known blocks per worker."""
        return dict(self._num_blocks)

    def _set(self, block: BlockHash, holders: tuple[str, ...]) -> None:
        self._workers[block] = self._combinations.setdefault(holders, holders)

    def _evict_oldest(self) -> None:
        block = next(iter(self._workers))
        for worker in self._workers.pop(block):
            self._num_blocks[worker] -= 1
        self.num_evicted += 1
