"""Where a scheduler's sequences are: waiting, reserved for a peer, or running."""

from __future__ import annotations

from engine.scheduler.errors import RequestStateError
from engine.sequence import Sequence, SequenceStatus


class SequenceQueues:
    """All unfinished sequences by request id, each in exactly one of three queues, in order of entry."""

    def __init__(self) -> None:
        self.all: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}  # new, preempted, or given back by a failed peer
        self.reserved: dict[str, Sequence] = {}  # a peer fills their blocks
        self.running: dict[str, Sequence] = {}

    @property
    def num_admitted(self) -> int:
        """Sequences that hold a place in the batch, now or as soon as they are activated."""
        return len(self.running) + len(self.reserved)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self.all[sequence.request_id] = self.waiting[sequence.request_id] = sequence

    def run(self, sequence: Sequence) -> None:
        """It joins the running batch."""
        self._move(sequence, self.running, SequenceStatus.RUNNING)

    def reserve(self, sequence: Sequence) -> None:
        """A peer fills its blocks from now on."""
        self._move(sequence, self.reserved, SequenceStatus.WAITING_FOR_REMOTE_KVS)

    def requeue(self, sequence: Sequence, status: SequenceStatus) -> None:
        """It waits again, as WAITING or PREEMPTED."""
        self._move(sequence, self.waiting, status)

    def forget(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a finished sequence out."""
        del self.all[sequence.request_id]
        self._move(sequence, {}, status)

    def reserved_sequence(self, request_id: str) -> Sequence:
        """The reserved sequence of that id. Raises RequestStateError unless it waits for remote KV."""
        sequence = self.all.get(request_id)
        if sequence is None:
            raise RequestStateError(f"request {request_id} is unknown, or has finished")
        if sequence.status is not SequenceStatus.WAITING_FOR_REMOTE_KVS:
            raise RequestStateError(
                f"request {request_id} is {sequence.status.name}, must be WAITING_FOR_REMOTE_KVS"
            )
        return sequence

    def check_invariants(self, max_num_seqs: int) -> None:
        """Raises AssertionError if queues and states contradict each other."""
        queued = [*self.waiting, *self.reserved, *self.running]
        assert sorted(queued) == sorted(self.all), "queues differ"
        for sequence in self.waiting.values():
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED), repr(sequence)
        for sequence in self.reserved.values():
            assert sequence.status is SequenceStatus.WAITING_FOR_REMOTE_KVS, repr(sequence)
        for sequence in self.running.values():
            assert sequence.status is SequenceStatus.RUNNING, repr(sequence)
            assert sequence.num_uncomputed_tokens >= 1, repr(sequence)
        assert self.num_admitted <= max_num_seqs, "too many sequences"

    def _move(self, sequence: Sequence, queue: dict[str, Sequence], status: SequenceStatus) -> None:
        for each in (self.waiting, self.reserved, self.running):
            each.pop(sequence.request_id, None)
        queue[sequence.request_id] = sequence
        sequence.status = status
