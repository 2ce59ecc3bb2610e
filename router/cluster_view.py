"""The router's picture of the cluster: members from the registry, loads and KV events from the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from cluster.members import PROTOCOL_VERSION, Members, RouterRecord, WorkerRecord
from cluster.messages import Envelope, KvEvents, LoadUpdate, Message, Subscribe, TokenBatch
from cluster.network import Connect, Connection
from cluster.problem_log import ProblemLog
from cluster.rpc import MessageEncodingError, RpcError
from router.state.cluster_state import ClusterState
from router.state.incompatible import Incompatible, incompatible_groups
from router.state.worker_view import WorkerView

logger = logging.getLogger(__name__)


class WorkerUnreachableError(Exception):
    """A message could not be queued for a worker: it has left, or its queue is full."""


class ClusterView:
    """Owns one connection per worker, and keeps ``state`` current with what comes through them.

    A worker is identified by id and incarnation. When a new incarnation registers, everything about the old
    one is forgotten, and its later messages are dropped and counted.

    ``on_tokens(worker, batch)`` gets the workers' outputs, ``on_worker_lost(worker)`` is called when a worker
    has left or its connection broke, ``on_dropped(reason)`` for each message that is ignored.
    ``vocab_sizes``: of this router's tokenizers, by model; a model of fewer tokens would not know some.
    """

    def __init__(
        self,
        *,
        connect: Connect,
        on_tokens: Callable[[str, TokenBatch], None],
        on_worker_lost: Callable[[str], None],
        on_dropped: Callable[[str], None],
        max_index_blocks: int = 1_000_000,
        vocab_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.state = ClusterState(max_index_blocks)
        self.routers: tuple[RouterRecord, ...] = ()  # in the order of their ids
        self._connect = connect
        self._on_tokens = on_tokens
        self._on_worker_lost = on_worker_lost
        self._on_dropped = on_dropped
        self._vocab_sizes = vocab_sizes or {}
        self._connections: dict[str, Connection] = {}
        self._members: Members | None = None  # the last that were taken in whole
        self._refused: list[Incompatible] = []
        self._warned_of: set[str] = set()
        self._problems = ProblemLog(logger)

    @property
    def incompatible(self) -> tuple[Incompatible, ...]:
        """What cannot work together, worked out when it is asked for."""
        return (*self._refused, *incompatible_groups(self._records()))

    def update(self, members: Members) -> None:
        """Take the registry's current members: connect to new workers, forget those that left.

        Free where they are those of the last time, unless something failed then.
        """
        if members == self._members:
            return
        self._members = None
        self.routers = members.routers
        records, self._refused = self._usable(members.workers)
        is_complete = True
        lost: list[str] = []
        for name in [view.record.id for view in self.state.workers if view.record.id not in records]:
            self._remove(name, "left the registry")
            lost.append(name)
        for name, record in records.items():
            known = self.state.get(name)
            if known is not None and record.incarnation > known.record.incarnation:
                self._remove(name, "restarted")
                lost.append(name)
                known = None
            if known is not None and record.incarnation < known.record.incarnation:
                self._on_dropped("old_incarnation")
            elif known is None:
                is_complete = self._add(record) and is_complete
            elif record != known.record:
                self._take_over(known.record, record)
        self._warn_of_incompatible()
        for name in lost:  # last, so that what is re-dispatched sees the members as they are now
            self._on_worker_lost(name)
        if is_complete:
            self._members = members

    def heartbeat(self) -> None:
        """Renew the subscription to every worker's load reports and KV events."""
        for worker in self.state.workers:
            self._subscribe(worker)

    def suspect_all(self) -> None:
        """This router stood still for so long that the workers may have given it up, and its requests."""
        for worker in self.state.workers:
            self._disconnected(worker.record)

    def close(self) -> None:
        """Drop all connections. Requests still on them are not reported as lost."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def send(self, worker: str, message: Message) -> int:
        """Queue ``message`` and return the worker's incarnation.

        Raises WorkerUnreachableError, and MessageEncodingError where the fault is the message's.
        """
        view, connection = self.state.get(worker), self._connections.get(worker)
        if view is None or connection is None:
            raise WorkerUnreachableError(f"worker {worker} has left")
        try:
            connection.send(message)
        except MessageEncodingError:
            raise
        except Exception as error:  # whatever the transport raises, the caller's choice is the same
            self._problems.report(
                ("send", worker), "cannot send %s to %s: %s", type(message).__name__, worker, error
            )
            raise WorkerUnreachableError(f"worker {worker} is unreachable: {error}") from error
        return view.record.incarnation

    def on_message(self, envelope: Envelope) -> None:
        """Take one message from a worker."""
        view = self.state.get(envelope.sender)
        if view is None:
            self._on_dropped("unknown_sender")
            return
        if envelope.incarnation != view.record.incarnation:
            old = envelope.incarnation < view.record.incarnation
            self._on_dropped("old_incarnation" if old else "unknown_incarnation")
            return
        if not view.is_reachable:
            key = ("reach", envelope.sender, envelope.incarnation)
            self._problems.over(key, "worker %s is reachable again", envelope.sender)
            view.set_reachable(True)
        message = envelope.message
        if isinstance(message, TokenBatch):
            self._on_tokens(envelope.sender, message)
        elif isinstance(message, LoadUpdate):
            view.report(message.load)
        elif isinstance(message, KvEvents):
            self._apply(view, message)
        else:
            self._on_dropped("unexpected_message")

    def _apply(self, view: WorkerView, events: KvEvents) -> None:
        if events.snapshot:
            self.state.kv_index.replace(view.slot, events.stored)
            view.kv_sequence = events.sequence
        elif view.kv_sequence is None or events.sequence > view.kv_sequence + 1:
            # Changes are missing. What is known may be stale, which is better than nothing until the
            # snapshot comes.
            view.kv_sequence = None
            self._on_dropped("kv_event_gap")
            self._subscribe(view)
        elif events.sequence <= view.kv_sequence:
            self._on_dropped("old_kv_event")
        else:
            # In this order a block that was evicted and stored again within one event stays.
            self.state.kv_index.remove(view.slot, events.removed)
            self.state.kv_index.store(view.slot, events.stored)
            view.kv_sequence = events.sequence

    def _subscribe(self, view: WorkerView) -> None:
        try:
            self._connections[view.record.id].send(Subscribe(snapshot=view.kv_sequence is None))
        except Exception as error:  # the next heartbeat tries again
            name = view.record.id
            self._problems.report(("subscribe", name), "cannot subscribe to %s: %s", name, error)

    def _add(self, record: WorkerRecord) -> bool:
        """Connect to a new worker; False if no connection could be opened."""
        try:
            connection = self._connect(record, self.on_message, lambda: self._disconnected(record))
        except RpcError as error:
            self._refused.append(Incompatible((record.id,), f"{record.id}: {error}"))
            self._problems.report(("connect", record.id), "worker %s: %s", record.id, error)
            return False
        self._connections[record.id] = connection
        view = self.state.add(record)
        logger.info("worker %s (%s, incarnation %d) joined", record.id, record.role, record.incarnation)
        self._subscribe(view)
        return True

    def _take_over(self, known: WorkerRecord, record: WorkerRecord) -> None:
        if record.role != known.role:
            logger.info("worker %s was %s and is %s", record.id, known.role, record.role)
        self.state.take_over(record)

    def _disconnected(self, record: WorkerRecord) -> None:
        view = self.state.get(record.id)
        if view is None or view.record.incarnation != record.incarnation or not view.is_reachable:
            return
        key = ("reach", record.id, record.incarnation)
        self._problems.report(key, "worker %s is unreachable", record.id)
        view.set_reachable(False)
        view.kv_sequence = None  # events may be lost: the next renewal asks for the whole cache
        self._on_worker_lost(record.id)

    def _remove(self, name: str, why: str) -> None:
        view = self.state.remove(name)
        logger.info("worker %s (incarnation %d) %s", name, view.record.incarnation, why)
        self._connections.pop(name).close()

    def _usable(self, workers: Sequence[WorkerRecord]) -> tuple[dict[str, WorkerRecord], list[Incompatible]]:
        """The records this router can talk to (of two with one id, the newer), and why not the others."""
        records: dict[str, WorkerRecord] = {}
        refused: list[Incompatible] = []
        for record in workers:
            reason = self._refusal(record)
            if reason is not None:
                refused.append(Incompatible((record.id,), reason))
            elif record.id not in records or records[record.id].incarnation < record.incarnation:
                records[record.id] = record
        return records, refused

    def _refusal(self, record: WorkerRecord) -> str | None:
        if record.protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version differs: {record.id} has {record.protocol_version}, "
                f"this router has {PROTOCOL_VERSION}"
            )
        vocab_size = self._vocab_sizes.get(record.model.name)
        if vocab_size is not None and vocab_size > record.model.vocab_size:
            return (
                f"vocabulary differs: {record.id} has {record.model.vocab_size} tokens, "
                f"this router's tokenizer has {vocab_size}"
            )
        return None

    def _warn_of_incompatible(self) -> None:
        reasons = {item.reason for item in incompatible_groups(self._records())}
        for reason in sorted(reasons - self._warned_of):
            logger.warning("workers cannot work together: %s", reason)
        self._warned_of = reasons

    def _records(self) -> list[WorkerRecord]:
        return [view.record for view in self.state.workers]
