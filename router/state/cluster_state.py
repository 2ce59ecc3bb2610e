"""All workers of the cluster as one router knows them: columns, KV index, and the pools of each model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.members import WorkerRecord, compatibility_key, takes_prefills, takes_requests
from router.state.columns import Column, Columns, Slots
from router.state.kv_index import KvIndex, slots_of
from router.state.prompt_hashes import HashGroup, PromptHashes
from router.state.worker_view import WorkerView

_FEW = 8  # workers of one hit, which are faster written one by one than through a mask


@dataclass(frozen=True, eq=False)
class ModelPool:
    """The workers of one model, whatever their state, by what they take; a worker may be in both pools."""

    decode: Slots  # in the order of their ids
    prefill: Slots
    groups: tuple[HashGroup, ...]  # for which a prompt must be hashed to find it in their caches


class ClusterState:
    """Who is there and what each has in hand. Pure: it is told of all that happens.

    What depends on the membership alone is worked out when it is asked for the first time after a change.
    """

    def __init__(self, max_index_blocks: int = 1_000_000) -> None:
        self.kv_index = KvIndex(max_index_blocks)
        self.columns = Columns()
        self._views: dict[str, WorkerView] = {}
        self._by_slot: list[WorkerView | None] = []
        self._free_slots: list[int] = []
        self._num_changes = 0  # of the membership
        self._workers: tuple[WorkerView, ...] | None = ()
        self._pools: dict[str, ModelPool] | None = {}

    @property
    def version(self) -> tuple[int, int]:
        """Another one after each change of who is there and who accepts work."""
        return self._num_changes, self.columns.num_accept_changes

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All workers, sorted by id."""
        if self._workers is None:
            self._workers = tuple(self._views[name] for name in sorted(self._views))
        return self._workers

    def get(self, worker: str) -> WorkerView | None:
        """One worker, or None if it is not a member."""
        return self._views.get(worker)

    def at(self, slot: int) -> WorkerView:
        """The worker of a slot that is in use."""
        view = self._by_slot[slot]
        assert view is not None
        return view

    def decode_workers(self, model: str) -> list[WorkerView]:
        """The workers that take requests for ``model``, whatever their state, sorted by id."""
        return [self.at(slot) for slot in self.pool(model).decode]

    def models(self, *, ready: bool) -> list[str]:
        """Names of the models for which a worker takes requests; with ``ready``, takes them now."""
        accepts = self.columns.accepts
        return sorted(
            name
            for name, pool in self._current_pools().items()
            if len(pool.decode) and (not ready or accepts[pool.decode].any())
        )

    def pool(self, model: str) -> ModelPool:
        """The workers of ``model``; an empty pool where there are none."""
        return self._current_pools().get(model) or _pool_of([])

    def add(self, record: WorkerRecord) -> WorkerView:
        """A worker whose id is new has joined."""
        assert record.id not in self._views, record.id
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._by_slot)
            self._by_slot.append(None)
            self.columns.grow_to(slot + 1)
        view = WorkerView(record, slot, self.columns)
        self._by_slot[slot] = self._views[record.id] = view
        self._members_changed()
        return view

    def take_over(self, record: WorkerRecord) -> None:
        """A worker has published another state of the same incarnation."""
        self._views[record.id].take_over(record)
        self._members_changed()

    def remove(self, worker: str) -> WorkerView:
        """A worker has left: forget it and its blocks. Its view must not be used any more."""
        view = self._views.pop(worker)
        self.kv_index.remove_worker(view.slot)
        self._by_slot[view.slot] = None
        self._free_slots.append(view.slot)
        self._members_changed()
        return view

    def cached_tokens(self, pool: ModelPool, hashes: PromptHashes, num_tokens: int) -> Column:
        """How many leading tokens of a sequence each worker need not compute: ``[capacity]``, whole blocks.

        The last token is always computed: its logits are needed. Rows outside ``pool`` hold nothing of use.
        """
        cached = np.zeros(self.columns.capacity, np.int64)
        slots: list[int] = []
        tokens: list[int] = []
        for group in pool.groups:  # whose hashes differ, so no worker is hit twice
            _, block_size = group
            most = (num_tokens - 1) // block_size
            for num_blocks, workers in self.kv_index.match(hashes.of(group)):
                num_cached = min(num_blocks, most) * block_size
                if workers.bit_count() > _FEW:
                    cached[_mask(workers, len(cached))] = num_cached
                else:
                    for slot in slots_of(workers):
                        slots.append(slot)
                        tokens.append(num_cached)
        cached[slots] = tokens
        return cached

    def _members_changed(self) -> None:
        self._num_changes += 1
        self._workers = self._pools = None

    def _current_pools(self) -> dict[str, ModelPool]:
        if self._pools is None:
            by_model: dict[str, list[WorkerView]] = {}
            numbers: dict[object, int] = {}
            for view in self.workers:
                by_model.setdefault(view.record.model.name, []).append(view)
                number = numbers.setdefault(compatibility_key(view.record), len(numbers))
                self.columns.compatibility[view.slot] = number
            self._pools = {name: _pool_of(views) for name, views in by_model.items()}
        return self._pools


def _pool_of(views: list[WorkerView]) -> ModelPool:
    def slots(taking: list[WorkerView]) -> Slots:
        return np.array([view.slot for view in taking], np.intp)

    return ModelPool(
        decode=slots([view for view in views if takes_requests(view.record.role)]),
        prefill=slots([view for view in views if takes_prefills(view.record.role)]),
        groups=tuple(sorted({view.group for view in views})),
    )


def _mask(workers: int, capacity: int) -> NDArray[np.bool_]:
    """A set of slots as ``[capacity]`` of bool."""
    packed = np.frombuffer(workers.to_bytes((capacity + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=capacity, bitorder="little").view(np.bool_)
