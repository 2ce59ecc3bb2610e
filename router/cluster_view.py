"""The router's picture of the cluster: members from the registry, loads and KV events from the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.members import (
    PROTOCOL_VERSION,
    Role,
    RouterRecord,
    WorkerRecord,
    incompatibility,
    takes_prefills,
    takes_requests,
)
from cluster.messages import Envelope, KvEvents, LoadUpdate, Message, Subscribe, TokenBatch
from cluster.problem_log import ProblemLog
from cluster.rpc import MessageEncodingError, RpcError
from router.policy.plan import WorkerSnapshot
from router.prompt_hashes import HashGroup, PromptHashes
from router.state.kv_index import KvIndex, slots_of
from router.worker_view import Connection, WorkerView

logger = logging.getLogger(__name__)

# (worker, what takes its messages, what is called when an established connection breaks)
Connect = Callable[[WorkerRecord, Callable[[Envelope], None], Callable[[], None]], Connection]


class WorkerUnreachableError(Exception):
    """A message could not be queued for a worker: it has left, or its queue is full."""


@dataclass(frozen=True)
class Incompatible:
    """Workers that cannot work together (two), or not with this router (one), and why."""

    workers: tuple[str, ...]
    reason: str


class ClusterView:
    """Owns one connection per worker and the KV index.

    A worker is identified by id and incarnation. When a new incarnation registers, everything about the old
    one is forgotten, and its later messages are dropped and counted.

    ``on_tokens(worker, batch)`` gets the workers' outputs, ``on_worker_lost(worker)`` is called when a worker
    has left or its connection broke, ``on_dropped(reason)`` for each message that is ignored.
    """

    def __init__(
        self,
        *,
        connect: Connect,
        on_tokens: Callable[[str, TokenBatch], None],
        on_worker_lost: Callable[[str], None],
        on_dropped: Callable[[str], None],
        max_index_blocks: int = 1_000_000,
        max_vocab_size: Callable[[str], int | None] = lambda model: None,
    ) -> None:
        self.kv_index = KvIndex(max_index_blocks)
        self.routers: tuple[RouterRecord, ...] = ()
        self.incompatible: tuple[Incompatible, ...] = ()
        self._connect = connect
        self._on_tokens = on_tokens
        self._on_worker_lost = on_worker_lost
        self._on_dropped = on_dropped
        self._max_vocab_size = max_vocab_size
        self._workers: dict[str, WorkerView] = {}
        self._free_slots: list[int] = []  # below the largest in use
        self._problems = ProblemLog(logger)

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All usable workers, sorted by id."""
        return tuple(self._workers[name] for name in sorted(self._workers))

    def get(self, worker: str) -> WorkerView | None:
        """One worker, or None if it is not a member."""
        return self._workers.get(worker)

    def decode_workers(self, model: str) -> list[WorkerView]:
        """The decode workers of ``model``, whatever their state."""
        return self._of(takes_requests, model)

    def prefill_workers(self, model: str) -> list[WorkerView]:
        """The prefill workers of ``model``, whatever their state."""
        return self._of(takes_prefills, model)

    def models(self, *, ready: bool) -> list[str]:
        """Names of the models that a decode worker serves; with ``ready``, that one serves now."""
        return sorted(
            {
                worker.record.model.name
                for worker in self._workers.values()
                if takes_requests(worker.record.role) and (worker.is_ready or not ready)
            }
        )

    def update(self, workers: Sequence[WorkerRecord], routers: Sequence[RouterRecord]) -> None:
        """Take the registry's current members: connect to new workers, forget those that left."""
        self.routers = tuple(sorted(routers, key=lambda record: record.id))
        records, refused = self._usable(workers)
        lost: list[str] = []
        for name in [name for name in self._workers if name not in records]:
            self._remove(name, "left the registry")
            lost.append(name)
        for name, record in records.items():
            known = self._workers.get(name)
            if known is not None and record.incarnation > known.record.incarnation:
                self._remove(name, "restarted")
                lost.append(name)
                known = None
            if known is not None and record.incarnation < known.record.incarnation:
                self._on_dropped("old_incarnation")
            elif known is not None:
                known.take_over(record)
            else:
                try:
                    self._add(record)
                except RpcError as error:  # tried again with the next list
                    refused.append(Incompatible((name,), f"{name}: {error}"))
                    self._problems.report(("connect", name), "worker %s: %s", name, error)
        self.incompatible = (*refused, *self._pair_up())
        for name in lost:  # last, so that what is re-dispatched sees the members as they are now
            self._on_worker_lost(name)

    def heartbeat(self) -> None:
        """Renew the subscription to every worker's load reports and KV events."""
        for worker in self._workers.values():
            self._subscribe(worker)

    def suspect_all(self) -> None:
        """This router stood still for so long that the workers may have given it up, and its requests."""
        for worker in list(self._workers.values()):
            self._disconnected(worker.record)

    def close(self) -> None:
        """Drop all connections. Requests still on them are not reported as lost."""
        for worker in self._workers.values():
            worker.connection.close()
        self._workers.clear()

    def send(self, worker: str, message: Message) -> int:
        """Queue ``message`` and return the worker's incarnation.

        Raises WorkerUnreachableError, and MessageEncodingError where the fault is the message's.
        """
        view = self._workers.get(worker)
        if view is None:
            raise WorkerUnreachableError(f"worker {worker} has left")
        try:
            view.connection.send(message)
        except MessageEncodingError:
            raise
        except Exception as error:  # whatever the transport raises, the caller's choice is the same
            self._problems.report(
                ("send", worker), "cannot send %s to %s: %s", type(message).__name__, worker, error
            )
            raise WorkerUnreachableError(f"worker {worker} is unreachable: {error}") from error
        return view.record.incarnation

    def hash_groups(self, model: str) -> tuple[HashGroup, ...]:
        """All groups that prompts of ``model`` may be hashed for."""
        workers = (*self.decode_workers(model), *self.prefill_workers(model))
        return tuple(sorted({worker.group for worker in workers}))

    def snapshots(
        self, model: str, hashes: PromptHashes
    ) -> tuple[list[WorkerSnapshot], list[WorkerSnapshot]]:
        """The policy's input for one request: decode and prefill workers with their prefix hits."""
        decode, prefill = self.decode_workers(model), self.prefill_workers(model)
        hit_blocks: dict[int, int] = {}  # by slot; the groups' hashes differ, so no worker is hit twice
        for group in {worker.group for worker in (*decode, *prefill)}:
            for num_blocks, workers in self.kv_index.match(hashes.of(group)):
                hit_blocks.update(dict.fromkeys(slots_of(workers), num_blocks))

        def snapshot(worker: WorkerView) -> WorkerSnapshot:
            return worker.snapshot(hit_blocks.get(worker.slot, 0) * worker.record.kv_layout.block_size)

        return [snapshot(worker) for worker in decode], [snapshot(worker) for worker in prefill]

    def on_message(self, envelope: Envelope) -> None:
        """Take one message from a worker."""
        view = self._workers.get(envelope.sender)
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
            view.is_reachable = True
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
            self.kv_index.replace(view.slot, events.stored)
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
            self.kv_index.remove(view.slot, events.removed)
            self.kv_index.store(view.slot, events.stored)
            view.kv_sequence = events.sequence

    def _subscribe(self, view: WorkerView) -> None:
        try:
            view.connection.send(Subscribe(snapshot=view.kv_sequence is None))
        except Exception as error:  # the next heartbeat tries again
            name = view.record.id
            self._problems.report(("subscribe", name), "cannot subscribe to %s: %s", name, error)

    def _add(self, record: WorkerRecord) -> None:
        connection = self._connect(record, self.on_message, lambda: self._disconnected(record))
        slot = self._free_slots.pop() if self._free_slots else len(self._workers)
        view = WorkerView(record, connection, slot)
        self._workers[record.id] = view
        logger.info("worker %s (%s, incarnation %d) joined", record.id, record.role, record.incarnation)
        self._subscribe(view)

    def _disconnected(self, record: WorkerRecord) -> None:
        view = self._workers.get(record.id)
        if view is None or view.record.incarnation != record.incarnation or not view.is_reachable:
            return
        key = ("reach", record.id, record.incarnation)
        self._problems.report(key, "worker %s is unreachable", record.id)
        view.is_reachable = False
        view.kv_sequence = None  # events may be lost: the next renewal asks for the whole cache
        self._on_worker_lost(record.id)

    def _remove(self, name: str, why: str) -> None:
        view = self._workers.pop(name)
        logger.info("worker %s (incarnation %d) %s", name, view.record.incarnation, why)
        view.connection.close()
        self.kv_index.remove_worker(view.slot)
        self._free_slots.append(view.slot)

    def _of(self, takes: Callable[[Role], bool], model: str) -> list[WorkerView]:
        return [
            worker
            for worker in self.workers
            if takes(worker.record.role) and worker.record.model.name == model
        ]

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
        vocab_size = self._max_vocab_size(record.model.name)
        if vocab_size is not None and vocab_size > record.model.vocab_size:
            return (
                f"vocabulary differs: {record.id} has {record.model.vocab_size} tokens, "
                f"this router's tokenizer has {vocab_size}"
            )
        return None

    def _pair_up(self) -> list[Incompatible]:
        """Work out each decode worker's compatible prefill workers; return the pairs that are not."""
        incompatible: list[Incompatible] = []
        prefill = [worker for worker in self.workers if takes_prefills(worker.record.role)]
        for decode in self.workers:
            if not takes_requests(decode.record.role):
                continue
            peers: set[str] = set()
            for worker in prefill:
                if worker is decode:
                    continue
                reason = incompatibility(decode.record, worker.record)
                if reason is None:
                    peers.add(worker.record.id)
                elif worker.record.model.name == decode.record.model.name and not (
                    # two that are both: said once
                    decode.record.role == worker.record.role and worker.record.id < decode.record.id
                ):
                    incompatible.append(Incompatible((decode.record.id, worker.record.id), reason))
            decode.peers = frozenset(peers)
        known = set(self.incompatible)
        for pair in incompatible:
            if pair not in known:
                logger.warning("%s cannot work together: %s", " and ".join(pair.workers), pair.reason)
        return incompatible
