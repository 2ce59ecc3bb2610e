"""The unified scheduler: every sequence's computed tokens chase its known tokens under one token budget.

Life of a request:

    add_request -> WAITING -> RUNNING -> FINISHED_*          computed here; prefill in chunks, then decode
                      ^          | no room to grow
                      +-PREEMPTED+                           recomputed: prompt and output so far
    add_request -> WAITING -> WAITING_FOR_REMOTE_KVS -> RUNNING (activate)
                      ^              |
                      +--------------+ fail_remote           computed here, in the blocks reserved before
                                     +-> FINISHED_ERROR      give_up_remote: the router plans it anew

Why nothing waits for ever. A prompt gets all its blocks at once when it is admitted, so only decodes grow,
and a decode that cannot grow preempts the youngest running sequence, in the end itself: the oldest one
always gets on. Candidates for admission are taken strictly in the policy's order, and the first one that
finds no room keeps those behind it out, so that room made by others goes to it. Sequences that already have
blocks (after fail_remote) pass by, as they take none. Reserved sequences hold blocks until their peer
finishes or fails, and count towards ``max_num_seqs`` so that each can run as soon as it is activated.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from cluster.load import QueueLoad
from cluster.messages import TokenLogprobs
from engine.batch import Batch, ScheduledSequence
from engine.kv_cache.kv_cache_manager import KvCacheManager
from engine.new_request import NewRequest
from engine.scheduler.admission import Admission
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.errors import QueueFullError, RequestStateError
from engine.scheduler.output import SchedulerOutput, SchedulerUpdate
from engine.scheduler.preemption import choose_victim
from engine.scheduler.queues import SequenceQueues
from engine.scheduler.request_limits import check_request
from engine.scheduler.sequence_outputs import error_output, prefill_progress, tokens_output
from engine.scheduler.stop_conditions import Stop, append_until_stop
from engine.sequence import SampledToken, Sequence, SequencePhase, SequenceStatus
from engine.step_result import PrefillProgress, Reservation, SequenceOutput


class Scheduler:
    """Queues of sequences, and the decision what each step computes.

    Call ``schedule``, compute its batch, then give the result to ``update_from_output`` or ``fail_step``.
    Several steps may be in flight, if they are computed and given back in order: ``schedule`` goes on from
    what they will have computed. Requests may be added, aborted and activated at any time in between.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KvCacheManager,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        """``max_model_len`` is in tokens; it is lowered to what the whole KV cache can hold."""
        if max_model_len < 2:
            raise ValueError(
                f"max_model_len is {max_model_len}, must be at least 2: a prompt and an output token"
            )
        self.config = config
        self.kv_cache = kv_cache
        self._eos_token_ids = eos_token_ids
        self._capacity_tokens = kv_cache.num_total_blocks * kv_cache.block_size
        self.max_model_len = min(max_model_len, self._capacity_tokens)
        self._model_len_limit = max_model_len
        self._admission = Admission(config, kv_cache)
        self._queues = SequenceQueues()
        self._num_arrived = 0
        self._num_preemptions = 0
        self.prompt_tokens_total = 0  # computed here or found in the cache; recomputed ones count once
        self.generation_tokens_total = 0  # sampled here

    # --- requests ------------------------------------------------------------------------------------------

    def add_request(self, request: NewRequest, now: float) -> None:
        """Queues a request that arrived at ``now`` (seconds).

        Raises ValueError if it is malformed or could never fit, QueueFullError if too many wait.
        """
        if request.request_id in self._queues.all or self.kv_cache.is_known(request.request_id):
            raise RequestStateError(
                f"request {request.request_id} exists already, or its blocks are not released yet"
            )
        check_request(request, capacity_tokens=self._capacity_tokens, max_model_len=self._model_len_limit)
        if len(self._queues.waiting) >= self.config.max_num_waiting:
            raise QueueFullError(f"{len(self._queues.waiting)} requests are waiting, at most that many may")
        sequence = Sequence(
            request,
            arrived_at=now,
            arrival_index=self._num_arrived,
            hash_root=self.kv_cache.hash_root(request.spec.cache_salt),
        )
        self._num_arrived += 1
        self._queues.add(sequence)

    def abort(self, request_id: str, *, quarantine: bool = False, hold: bool = False) -> bool:
        """Drops a request, without any output. Returns False if it is unknown or already finished.

        ``quarantine``: if its blocks are reserved, keep them out of reuse until ``release_quarantined``, as
        the peer may still write. ``hold``: keep its blocks, if it has any, until ``release``, as they may
        still be read by a transfer.
        """
        sequence = self._queues.all.get(request_id)
        if sequence is None:
            return False
        reserved = sequence.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
        self._queues.forget(sequence, SequenceStatus.FINISHED_ABORTED)
        if not self.kv_cache.is_known(request_id):
            return True
        if quarantine and reserved:
            self.kv_cache.quarantine(request_id)
        elif hold:
            self.kv_cache.hold(request_id)
        else:
            self.kv_cache.free(request_id)
        return True

    def activate(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """A peer has written the KV of all known tokens and sampled the next one: the sequence runs.

        Returns that token's output. Raises RequestStateError unless the request waits for remote KV.
        """
        sequence = self._queues.reserved_sequence(request_id)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.num_prompt_tokens_counted = sequence.num_prompt_tokens
        self.kv_cache.remote_writer_done(request_id)
        self.kv_cache.register_computed(sequence)
        sequence.remote_prefill = False  # if it is preempted, it is recomputed here
        self._queues.run(sequence)
        accepted, stop = self._append(sequence, [SampledToken(token_id=first_token, logprobs=logprobs)])
        return self._tokens_output(sequence, accepted, stop)

    def fail_remote(self, request_id: str, num_landed_tokens: int) -> None:
        """The peer failed, and no longer writes: the request is computed here, in its reserved blocks.

        The first ``num_landed_tokens`` positions (those cached here before included) already hold valid KV.
        Raises RequestStateError unless the request waits for remote KV, ValueError on an impossible number.
        """
        sequence = self._take_landed(request_id, num_landed_tokens)
        self.kv_cache.remote_writer_done(request_id)
        sequence.remote_prefill = False
        self._queues.requeue(sequence, SequenceStatus.WAITING)

    def give_up_remote(
        self, request_id: str, num_landed_tokens: int, error: str, *, quarantine: bool
    ) -> SequenceOutput:
        """The peer failed: the request ends with ``error``. What has landed goes into the prefix cache.

        With ``quarantine`` the other blocks are kept out of reuse until ``release_quarantined``, as the peer
        may still write into them. Raises as ``fail_remote`` does.
        """
        sequence = self._take_landed(request_id, num_landed_tokens)
        if quarantine:
            self._queues.forget(sequence, SequenceStatus.FINISHED_ERROR)
            self.kv_cache.quarantine(request_id)
            return error_output(sequence, error)
        return self._finish_with_error(sequence, error)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished request of that id."""
        return self._queues.all.get(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step might have something to do: requests that wait for a peer do not count."""
        return bool(self._queues.running or self._queues.waiting)

    def load(self) -> QueueLoad:
        """Lengths of the queues, and totals."""
        return QueueLoad(
            running=len(self._queues.running),
            waiting=len(self._queues.waiting),
            waiting_for_remote_kv=len(self._queues.reserved),
            waiting_prefill_tokens=self._admission.num_prefill_tokens(
                self._queues.running.values(), self._queues.waiting.values()
            ),
            preemptions_total=self._num_preemptions,
        )

    # --- one step ------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Decides what the step at ``now`` (seconds) computes: decodes first, then prefill chunks."""
        budget = self.config.max_num_batched_tokens
        chunks: list[tuple[Sequence, int]] = []
        preempted: list[str] = []
        # Oldest first: a victim, being the youngest, has then not been scheduled yet in this step.
        for sequence in sorted(self._queues.running.values(), key=lambda running: running.arrival_index):
            count = sequence.num_unscheduled_tokens
            if sequence.phase is not SequencePhase.DECODE or not 0 < count <= budget:
                continue
            if self._grow(sequence, preempted):
                chunks.append((sequence, count))
                budget -= count
        reservations: list[Reservation] = []
        chunks += self._schedule_prefills(now, budget, reservations, may_admit=not preempted)
        first_scheduled = tuple(sequence.request_id for sequence, _ in chunks if not sequence.was_scheduled)
        for sequence, _ in chunks:
            sequence.was_scheduled = True
        return SchedulerOutput(
            batch=Batch(tuple(self._scheduled(sequence, count) for sequence, count in chunks)),
            sequences=tuple(sequence for sequence, _ in chunks),
            reservations=tuple(reservations),
            first_scheduled=first_scheduled,
            preempted=tuple(preempted),
        )

    def update_from_output(
        self, output: SchedulerOutput, sampled: SequenceOf[SequenceOf[SampledToken]]
    ) -> SchedulerUpdate:
        """Takes in a computed step: ``sampled[i]`` are the new tokens of ``output.sequences[i]``.

        There are at most ``num_logits`` of them, fewer where draft tokens at the part's end were rejected.
        Requests aborted since ``schedule`` are skipped.
        """
        self._end_flight(output)
        outputs: list[SequenceOutput] = []
        progress: list[PrefillProgress] = []
        for sequence, scheduled, tokens in zip(
            output.sequences, output.batch.sequences, sampled, strict=True
        ):
            if self._queues.all.get(sequence.request_id) is not sequence:
                continue
            failed = next((token for token in tokens if token.error is not None), None)
            if failed is not None and failed.error is not None:
                # What made the logits unusable may sit in the KV: nobody shall find it by its hash.
                self.kv_cache.discard_cached(sequence.request_id)
                outputs.append(self._finish_with_error(sequence, failed.error, is_refusal=failed.is_refusal))
                continue
            is_first_chunk = sequence.num_computed_tokens == sequence.num_cached_tokens
            accepted, stop = self._append(sequence, tokens)
            self._advance(sequence, scheduled, num_rejected=scheduled.num_logits - len(tokens))
            if sequence.prefill_only:
                block_ids = self.kv_cache.block_table(sequence.request_id, sequence.num_computed_tokens)
                progress.append(prefill_progress(sequence, block_ids, is_first_chunk=is_first_chunk))
            if accepted:
                self.generation_tokens_total += len(accepted)
                outputs.append(self._tokens_output(sequence, accepted, stop))
        return SchedulerUpdate(outputs=tuple(outputs), progress=tuple(progress))

    def fail_step(self, output: SchedulerOutput, error: str) -> SchedulerUpdate:
        """The step could not be computed: its requests fail, all others are as before it."""
        self._end_flight(output)
        return SchedulerUpdate(
            outputs=tuple(
                self._finish_with_error(sequence, error)
                for sequence in output.sequences
                if self._queues.all.get(sequence.request_id) is sequence
            )
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if queues, sequences and KV cache contradict each other."""
        self._queues.check_invariants(self.config.max_num_seqs)
        self.kv_cache.check_invariants(self._queues.all.values())

    # --- parts of schedule ---------------------------------------------------------------------------------

    def _schedule_prefills(
        self, now: float, budget: int, reservations: list[Reservation], *, may_admit: bool
    ) -> list[tuple[Sequence, int]]:
        """Chunks of started and waiting prompts in the policy's order; fills ``reservations``."""
        candidates = self._admission.prefill_candidates(
            self._queues.running.values(), self._queues.waiting.values(), now
        )
        largest_chunk = budget
        if len(candidates) > 1 and self.config.long_prefill_token_threshold:
            largest_chunk = self.config.long_prefill_token_threshold
        chunks: list[tuple[Sequence, int]] = []
        for sequence in candidates:
            if sequence.status is not SequenceStatus.RUNNING:
                has_blocks = self.kv_cache.is_known(sequence.request_id)
                if not may_admit and not has_blocks:
                    continue
                if budget == 0 and not sequence.remote_prefill:
                    continue
                if not has_blocks and not self._admission.allocate_prompt(
                    sequence, self._queues.num_admitted
                ):
                    may_admit = False
                    continue
                if has_blocks and self._queues.num_admitted >= self.config.max_num_seqs:
                    continue
                if sequence.remote_prefill:
                    reservations.append(self._reserve(sequence))
                    continue
                self._queues.run(sequence)
            count = min(sequence.num_unscheduled_tokens, budget, largest_chunk)
            if count > 0:
                chunks.append((sequence, count))
                budget -= count
        return chunks

    def _reserve(self, sequence: Sequence) -> Reservation:
        self._queues.reserve(sequence)
        return Reservation(
            request_id=sequence.request_id,
            block_ids=self.kv_cache.block_table(sequence.request_id, sequence.num_tokens),
            num_cached_tokens=sequence.num_computed_tokens,
        )

    def _grow(self, sequence: Sequence, preempted: list[str]) -> bool:
        """Makes room for its new tokens, preempting the youngest if need be. False if there is none now."""
        while not self.kv_cache.extend(sequence.request_id, sequence.num_tokens):
            victim = choose_victim(self._queues.running.values(), sequence)
            if victim is None:
                return False
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv_cache.free(sequence.request_id)
        sequence.num_computed_tokens = 0
        sequence.phase = SequencePhase.PREFILL
        self._num_preemptions += 1
        self._queues.requeue(sequence, SequenceStatus.PREEMPTED)

    def _scheduled(self, sequence: Sequence, count: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens + sequence.num_in_flight_tokens
        scheduled = ScheduledSequence(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.all_token_ids[start : start + count]),
            start=start,
            block_ids=self.kv_cache.block_table(sequence.request_id, start + count),
            num_logits=1 if start + count == sequence.num_tokens else 0,
        )
        sequence.num_in_flight_tokens += count
        self.kv_cache.pin(scheduled.block_ids, scheduled.start)
        return scheduled

    # --- parts of update -----------------------------------------------------------------------------------

    def _end_flight(self, output: SchedulerOutput) -> None:
        for sequence, scheduled in zip(output.sequences, output.batch.sequences, strict=True):
            sequence.num_in_flight_tokens -= len(scheduled.token_ids)
            self.kv_cache.unpin(scheduled.block_ids, scheduled.start)

    def _append(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken]
    ) -> tuple[SequenceOf[SampledToken], Stop | None]:
        if tokens:
            sequence.phase = SequencePhase.DECODE
        return append_until_stop(sequence, tokens, self._eos_token_ids, self.max_model_len)

    def _advance(self, sequence: Sequence, scheduled: ScheduledSequence, num_rejected: int) -> None:
        """Takes in the KV of computed tokens, but for ``num_rejected`` ones at the part's end.

        The prefix cache gets blocks of known tokens only: those accepted have been appended before.
        """
        num_computed = scheduled.start + len(scheduled.token_ids) - num_rejected
        sequence.num_computed_tokens = min(num_computed, sequence.num_tokens)
        self.kv_cache.register_computed(sequence)
        counted = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if counted > sequence.num_prompt_tokens_counted:
            self.prompt_tokens_total += counted - sequence.num_prompt_tokens_counted
            sequence.num_prompt_tokens_counted = counted

    def _tokens_output(
        self, sequence: Sequence, tokens: SequenceOf[SampledToken], stop: Stop | None
    ) -> SequenceOutput:
        if stop is not None:
            self._finish(sequence, stop.status)
        return tokens_output(sequence, tokens, stop)

    def _take_landed(self, request_id: str, num_landed_tokens: int) -> Sequence:
        """Takes in what a peer wrote into a reserved sequence's blocks before it failed."""
        sequence = self._queues.reserved_sequence(request_id)
        if not 0 <= num_landed_tokens <= sequence.num_tokens:
            raise ValueError(
                f"num_landed_tokens of request {request_id} is {num_landed_tokens},"
                f" must be from 0 to its {sequence.num_tokens} tokens"
            )
        # The last token is computed in any case: its logits are needed.
        landed = min(num_landed_tokens, sequence.num_tokens - 1)
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, landed)
        sequence.num_prompt_tokens_counted = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self.kv_cache.register_computed(sequence)
        return sequence

    def _finish_with_error(
        self, sequence: Sequence, error: str, *, is_refusal: bool = False
    ) -> SequenceOutput:
        self._finish(sequence, SequenceStatus.FINISHED_ERROR)
        return error_output(sequence, error, is_refusal=is_refusal)

    def _finish(self, sequence: Sequence, status: SequenceStatus) -> None:
        self._queues.forget(sequence, status)
        if sequence.prefill_only:
            # However it ended: chunks reported earlier may still be on their way to a peer.
            self.kv_cache.hold(sequence.request_id)
        else:
            self.kv_cache.free(sequence.request_id)
