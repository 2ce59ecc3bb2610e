"""What policies read of the workers, as one array per quantity with a row per worker."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.intp]  # rows, in an order that matters: the first of equals is taken
Column = NDArray[np.int64]

UNLIMITED = 1 << 62


class Columns:
    """Arrays ``[capacity]``, indexed by a worker's slot. Rows that no worker has hold anything.

    They are written by ``WorkerView`` as reports and dispatches come, so that a decision has nothing left to
    collect. Growing replaces the arrays: take them from here each time.
    """

    def __init__(self, capacity: int = 16) -> None:
        self.accepts: NDArray[np.bool_] = np.zeros(capacity, np.bool_)  # takes new work: ``set_accepts``
        self.num_requests = _column(capacity)
        self.prefill_tokens = _column(capacity)  # uncached prompt tokens still to compute
        self.kv_blocks_free = _column(capacity)
        self.kv_tokens_free = _column(capacity)  # the same in tokens; UNLIMITED where nothing was reported
        self.max_tokens = _column(capacity)  # the longest sequence whose next token it can compute
        self.compatibility = _column(capacity)  # workers with one number can hand over to each other
        self.num_accept_changes = 0

    @property
    def capacity(self) -> int:
        """How many rows there are."""
        return len(self.accepts)

    def set_accepts(self, slot: int, accepts: bool) -> None:
        """Whether the worker can be reached and takes new work."""
        if self.accepts[slot] != accepts:
            self.accepts[slot] = accepts
            self.num_accept_changes += 1

    def grow_to(self, num_rows: int) -> None:
        """Have at least that many rows."""
        if num_rows > self.capacity:
            capacity = max(num_rows, 2 * self.capacity)
            for name, column in list(vars(self).items()):
                if isinstance(column, np.ndarray):
                    larger = np.zeros(capacity, column.dtype)
                    larger[: len(column)] = column
                    setattr(self, name, larger)


def _column(capacity: int) -> Column:
    return np.zeros(capacity, np.int64)
