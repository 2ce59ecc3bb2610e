"""What the router knows about one worker: its registration, its last load report, and its own dispatches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from cluster.load import LoadReport
from cluster.members import Role, WorkerRecord, takes_requests
from cluster.messages import Message
from cluster.sequence_spec import RequestKey
from router.policy.plan import WorkerSnapshot
from router.prompt_hashes import HashGroup, hash_group

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """The sending half of an RPC connection (``cluster.rpc.RpcConnection``)."""

    def send(self, message: Message) -> None:
        """Queue one message, or raise if the worker cannot take it."""
        ...

    def close(self) -> None:
        """Drop the connection."""
        ...


class WorkerView:
    """Load as the worker reported it, corrected by what was dispatched since.

    A load report is up to one interval old. Requests dispatched since are counted on top of it, so that a
    burst within an interval spreads; and the total is never below what this router itself has in flight.
    """

    def __init__(self, record: WorkerRecord, connection: Connection, slot: int) -> None:
        """``slot`` is the worker's number in the KV index while it is a member."""
        self.record = record
        self.connection = connection
        self.slot = slot
        self.group: HashGroup = hash_group(record)
        self.load: LoadReport | None = None
        self.kv_sequence: int | None = None  # of the last KV event applied; None until a snapshot came
        self.is_reachable = True  # until the connection breaks, and again with the next message
        self.was_told_to_drain = False  # through this router; the worker itself says so with its next report
        self.ordered_role: Role | None = None  # through this router, until the worker's record changes
        self.peers: frozenset[str] = frozenset()  # compatible prefill workers, if this is a decode worker
        self._requests: set[RequestKey] = set()
        self._prefills: dict[RequestKey, int] = {}  # uncached prompt tokens
        self._unreported_requests: set[RequestKey] = set()
        self._unreported_prefills: dict[RequestKey, int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether it said that it takes requests."""
        return self.state == "ready"

    @property
    def state(self) -> str:
        """What it said of itself (``starting`` until it did), or ``unreachable``."""
        if not self.is_reachable:
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
            logger.info("worker %s was %s and is %s", record.id, self.record.role, record.role)
            self.ordered_role = None
        self.record = record

    def keeps(self, takes: Callable[[Role], bool]) -> bool:
        """Whether it does some work, and was not ordered to give it up."""
        return takes(self.record.role) and (self.ordered_role is None or takes(self.ordered_role))

    def report(self, load: LoadReport) -> None:
        """Take a new load report, which includes all dispatches so far."""
        self.load = load
        self._unreported_requests.clear()
        self._unreported_prefills.clear()

    def add_request(self, key: RequestKey) -> None:
        """Count a dispatch to this decode worker."""
        self._requests.add(key)
        self._unreported_requests.add(key)

    def remove_request(self, key: RequestKey) -> None:
        """The request finished or left."""
        self._requests.discard(key)
        self._unreported_requests.discard(key)

    def add_prefill(self, key: RequestKey, num_tokens: int) -> None:
        """Count a prompt that this worker will compute."""
        self._prefills[key] = num_tokens
        self._unreported_prefills[key] = num_tokens

    def remove_prefill(self, key: RequestKey) -> None:
        """The prompt is computed, or will not be."""
        self._prefills.pop(key, None)
        self._unreported_prefills.pop(key, None)

    def snapshot(self, cached_tokens: int) -> WorkerSnapshot:
        """What the policy sees. ``cached_tokens`` is the request's prefix hit here."""
        load = self.load or LoadReport()
        queue = load.queue
        reported = queue.running + queue.waiting + queue.waiting_for_remote_kv
        if not takes_requests(self.record.role):
            own, unreported = len(self._prefills), len(self._unreported_prefills)
        else:
            own, unreported = len(self._requests), len(self._unreported_requests)
        return WorkerSnapshot(
            id=self.record.id,
            state=load.state,
            num_requests=max(reported + unreported, own),
            num_outstanding_prefill_tokens=max(
                queue.waiting_prefill_tokens + sum(self._unreported_prefills.values()),
                sum(self._prefills.values()),
            ),
            kv_blocks_total=load.kv.blocks_total,
            kv_blocks_free=load.kv.blocks_free,
            block_size=self.record.kv_layout.block_size,
            max_model_len=self.record.model.max_model_len,
            cached_tokens=cached_tokens,
            peers=self.peers,
            is_reachable=self.is_reachable,
        )
