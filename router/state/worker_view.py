"""What the router knows about one worker: its registration, its last load report, and its own dispatches."""

from __future__ import annotations

from collections.abc import Callable

from cluster.load import LoadReport
from cluster.members import Role, WorkerRecord, takes_requests
from cluster.sequence_spec import RequestKey
from router.state.columns import UNLIMITED, Columns
from router.state.prompt_hashes import HashGroup, hash_group


class WorkerView:
    """Load as the worker reported it, corrected by what was dispatched since, and written into its row.

    A load report is up to one interval old. Requests dispatched since are counted on top of it, so that a
    burst within an interval spreads; and the total is never below what this router itself has in flight.
    """

    def __init__(self, record: WorkerRecord, slot: int, columns: Columns) -> None:
        """``slot`` is the worker's row in ``columns`` and its number in the KV index while it is a member."""
        self.record = record
        self.slot = slot
        self.group: HashGroup = hash_group(record)
        self.load: LoadReport | None = None
        self.kv_sequence: int | None = None  # of the last KV event applied; None until a snapshot came
        self.was_told_to_drain = False  # through this router; the worker itself says so with its next report
        self.ordered_role: Role | None = None  # through this router, until the worker's record changes
        self._is_reachable = True  # until the connection breaks, and again with the next message
        self._columns = columns
        self._requests: set[RequestKey] = set()
        self._prefills: dict[RequestKey, int] = {}  # uncached prompt tokens
        self._num_own_prefill_tokens = 0  # the sum of them
        self._unreported_requests: set[RequestKey] = set()
        self._unreported_prefills: dict[RequestKey, int] = {}
        self._num_unreported_prefill_tokens = 0
        self._write_report()

    @property
    def is_reachable(self) -> bool:
        """Whether its connection holds, as far as is known."""
        return self._is_reachable

    @property
    def is_ready(self) -> bool:
        """Whether it said that it takes requests."""
        return self.state == "ready"

    @property
    def state(self) -> str:
        """What it said of itself (``starting`` until it did), or ``unreachable``."""
        if not self._is_reachable:
            return "unreachable"
        return self.load.state if self.load is not None else "starting"

    @property
    def is_draining(self) -> bool:
        """Whether it ends, as far as this router knows."""
        return self.was_told_to_drain or self.state == "draining"

    @property
    def num_in_flight(self) -> int:
        """Requests of this router on this worker."""
        return len(self._requests)

    def take_over(self, record: WorkerRecord) -> None:
        """Another state of the same incarnation: its role may have changed."""
        if record.role != self.record.role:
            self.ordered_role = None
        self.record = record
        self._write_dispatches()

    def keeps(self, takes: Callable[[Role], bool]) -> bool:
        """Whether it does some work, and was not ordered to give it up."""
        return takes(self.record.role) and (self.ordered_role is None or takes(self.ordered_role))

    def set_reachable(self, is_reachable: bool) -> None:
        """The connection broke, or a message came through again."""
        self._is_reachable = is_reachable
        self._columns.set_accepts(self.slot, self.is_ready)

    def report(self, load: LoadReport) -> None:
        """Take a new load report, which includes all dispatches so far."""
        self.load = load
        self._unreported_requests.clear()
        self._unreported_prefills.clear()
        self._num_unreported_prefill_tokens = 0
        self._write_report()

    def add_request(self, key: RequestKey) -> None:
        """Count a dispatch to this decode worker."""
        self._requests.add(key)
        self._unreported_requests.add(key)
        self._write_dispatches()

    def remove_request(self, key: RequestKey) -> None:
        """The request finished or left."""
        self._requests.discard(key)
        self._unreported_requests.discard(key)
        self._write_dispatches()

    def add_prefill(self, key: RequestKey, num_tokens: int) -> None:
        """Count a prompt that this worker will compute."""
        self.remove_prefill(key)
        self._prefills[key] = self._unreported_prefills[key] = num_tokens
        self._num_own_prefill_tokens += num_tokens
        self._num_unreported_prefill_tokens += num_tokens
        self._write_dispatches()

    def remove_prefill(self, key: RequestKey) -> None:
        """The prompt is computed, or will not be."""
        self._num_own_prefill_tokens -= self._prefills.pop(key, 0)
        self._num_unreported_prefill_tokens -= self._unreported_prefills.pop(key, 0)
        self._write_dispatches()

    def _write_report(self) -> None:
        """Write the whole row."""
        columns, slot = self._columns, self.slot
        kv = (self.load or LoadReport()).kv
        block_size = self.record.kv_layout.block_size
        longest = self.record.model.max_model_len - 1
        if kv.blocks_total:  # one place is for the next token
            longest = min(longest, kv.blocks_total * block_size - 1)
        columns.set_accepts(slot, self.is_ready)
        columns.max_tokens[slot] = longest
        columns.kv_blocks_free[slot] = kv.blocks_free
        columns.kv_tokens_free[slot] = kv.blocks_free * block_size if kv.blocks_total else UNLIMITED
        self._write_dispatches()

    def _write_dispatches(self) -> None:
        queue = (self.load or LoadReport()).queue
        if takes_requests(self.record.role):
            own, unreported = len(self._requests), len(self._unreported_requests)
        else:
            own, unreported = len(self._prefills), len(self._unreported_prefills)
        reported = queue.running + queue.waiting + queue.waiting_for_remote_kv
        self._columns.num_requests[self.slot] = max(reported + unreported, own)
        self._columns.prefill_tokens[self.slot] = max(
            queue.waiting_prefill_tokens + self._num_unreported_prefill_tokens, self._num_own_prefill_tokens
        )
