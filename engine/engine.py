"""One worker's engine: scheduler, KV cache, model runner and sampler behind one step function."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.block_hash import BlockHash
from cluster.load import Load
from cluster.messages import TokenLogprobs
from engine.batch import Batch
from engine.kv_cache.kv_cache_manager import KvCacheManager
from engine.new_request import NewRequest
from engine.sampler.logits_state import LogitsState, logits_states
from engine.sampler.params_check import check_sampling_params
from engine.sampler.sampler import Sampler, SamplingRow
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import SchedulerOutput, SchedulerUpdate
from engine.scheduler.scheduler import Scheduler
from engine.sequence import SampledToken
from engine.step_history import StepHistory
from engine.step_result import SequenceOutput, StepResult

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes batches. ``engine.model_runner.ModelRunner`` is one."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Writes the batch's KV, and returns fp32 logits [sum of num_logits, vocab], in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step whose results have not been taken in. With neither logits nor error it computes nothing."""

    now: float  # the caller's clock at its launch
    began: float  # seconds of time.perf_counter
    scheduled: SchedulerOutput
    logits: torch.Tensor | None = None  # as Runner.forward gives them; a device may still be at it
    error: Exception | None = None


class Engine:
    """Runs requests on one model. Single-threaded: call everything from one thread (see ``EngineLoop``).

    Times are seconds on the caller's clock. Every request that was accepted and not aborted ends with one
    ``SequenceOutput`` that has a ``finish_reason``; aborted ones end without.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        scheduler_config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        vocab_size: int,
        hash_root: Callable[[str], BlockHash],
        prefix_caching: bool,
    ) -> None:
        """``num_blocks`` includes the null block 0, which is never allocated. ``block_size`` is in tokens.

        ``hash_root`` maps a request's cache salt to the root of its block-hash chain, usually
        ``functools.partial(root_hash, model_fingerprint, block_size)``. Raises ValueError on impossible
        sizes.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        self._kv_cache = KvCacheManager(num_blocks, block_size, hash_root, prefix_caching=prefix_caching)
        self._scheduler = Scheduler(
            scheduler_config,
            self._kv_cache,
            eos_token_ids=frozenset(eos_token_ids),
            max_model_len=max_model_len,
        )
        self._sampler = Sampler(eos_token_ids)
        self._logits_states: dict[str, tuple[LogitsState, ...]] = {}  # of requests that have any
        self._pending_outputs: list[SequenceOutput] = []
        self._steps = StepHistory()
        self._collected_at = 0.0

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence: the model's limit, or what the KV cache holds if that is less."""
        return self._scheduler.max_model_len

    def add_request(self, request: NewRequest, now: float) -> None:
        """Queues a request.

        Raises ValueError if it is malformed, DoesNotFitError (a ValueError) if it could never fit here,
        RequestStateError (a ValueError) if its id is still in use, and QueueFullError if too many wait.
        """
        for name, token_ids in (
            ("prompt", request.spec.prompt_token_ids),
            ("output", request.spec.output_token_ids),
        ):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
                bad = next(token for token in token_ids if not 0 <= token < self._vocab_size)
                raise ValueError(
                    f"request {request.request_id} has {name} token {bad},"
                    f" must be from 0 to {self._vocab_size - 1}"
                )
        check_sampling_params(request.spec.sampling, self._vocab_size)
        self._scheduler.add_request(request, now)
        if states := logits_states(request.spec):
            self._logits_states[request.request_id] = states

    def abort(self, request_id: str, *, quarantine: bool = False, hold: bool = False) -> bool:
        """Drops a request; no output for it follows. Returns False if it is unknown or already finished.

        With ``quarantine``, blocks reserved for a peer are not reused until ``release_quarantined``: the peer
        may still write into them. Without, they are free at once: only after the peer is fenced. With
        ``hold``, its blocks stay until ``release``: a transfer may still read them.
        """
        # Also of a request that its first token has finished, before a step could report that.
        self._pending_outputs = [out for out in self._pending_outputs if out.request_id != request_id]
        if not self._scheduler.abort(request_id, quarantine=quarantine, hold=hold):
            return False
        self._logits_states.pop(request_id, None)
        return True

    def activate(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None) -> None:
        """A peer has written the whole reserved prompt and sampled ``first_token``: the request runs.

        The token's output comes with the next step. Raises RequestStateError unless the request has a
        reservation, ValueError if the token is not in the vocabulary.
        """
        if not 0 <= first_token < self._vocab_size:
            raise ValueError(
                f"first_token of request {request_id} is {first_token},"
                f" must be from 0 to {self._vocab_size - 1}"
            )
        self._take_output(self._scheduler.activate(request_id, first_token, logprobs))

    def fail_remote(self, request_id: str, num_landed_tokens: int) -> None:
        """The peer failed and no longer writes: the request is computed here, in the blocks reserved for it.

        The first ``num_landed_tokens`` positions, counted from the prompt's start, already hold valid KV.
        Raises RequestStateError unless the request has a reservation, ValueError on an impossible number.
        """
        self._scheduler.fail_remote(request_id, num_landed_tokens)

    def give_up_remote(
        self, request_id: str, num_landed_tokens: int, error: str, *, quarantine: bool
    ) -> None:
        """The peer failed: the request ends with an output that says ``error``, with the next step.

        The full blocks among the first ``num_landed_tokens`` positions stay in the prefix cache, for whoever
        tries again. With ``quarantine`` the others are not reused until ``release_quarantined``. Raises as
        ``fail_remote`` does.
        """
        self._take_output(
            self._scheduler.give_up_remote(request_id, num_landed_tokens, error, quarantine=quarantine)
        )

    def release(self, request_id: str) -> bool:
        """Frees the blocks held by a finished ``prefill_only`` request, or by an abort with ``hold``.

        Returns whether there were any.
        """
        return self._kv_cache.release(request_id)

    def release_quarantined(self, request_id: str) -> bool:
        """Frees the blocks of an abort with ``quarantine``: the writer is done, fenced or dead.

        Returns whether there were any.
        """
        return self._kv_cache.release_quarantined(request_id)

    def has_work(self) -> bool:
        """Whether a step might do something. Requests that wait for a peer are no work."""
        return bool(self._scheduler.has_unfinished or self._pending_outputs or self._kv_cache.has_events)

    def cached_block_hashes(self) -> list[BlockHash]:
        """Every block hash in the prefix cache."""
        return self._kv_cache.snapshot()

    def load(self) -> Load:
        """Lengths of the queues, use of the blocks, the newest steps, and totals since start."""
        return Load(
            queue=self._scheduler.load(),
            kv=self._kv_cache.load(),
            steps=self._steps.load(
                prompt_tokens_total=self._scheduler.prompt_tokens_total,
                generation_tokens_total=self._scheduler.generation_tokens_total,
            ),
        )

    def step(self, now: float) -> StepResult:
        """Schedules, computes and samples once."""
        return self.collect(self.launch(now))

    def launch(self, now: float) -> LaunchedStep:
        """Schedules a step at ``now`` and starts computing it. Give it to ``collect``, in order.

        Another may be launched, and commands may come, before that. Neither this nor ``collect`` raises for
        what the model or a request does: if a step fails, the requests in its batch end with an error.
        """
        began = time.perf_counter()
        if self._pending_outputs:
            # First tokens of activated requests need not wait for the model: nothing is computed.
            return LaunchedStep(now=now, began=began, scheduled=SchedulerOutput(batch=Batch(())))
        scheduled = self._scheduler.schedule(now)
        if not scheduled.sequences:
            return LaunchedStep(now=now, began=began, scheduled=scheduled)
        try:
            logits = self._runner.forward(scheduled.batch)
        except Exception as error:
            return LaunchedStep(now=now, began=began, scheduled=scheduled, error=error)
        return LaunchedStep(now=now, began=began, scheduled=scheduled, logits=logits)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Waits for a launched step, samples from its logits, and says what came of it."""
        scheduled, update = step.scheduled, self._finish_step(step)
        for output in update.outputs:
            self._take_output(output)
        outputs, self._pending_outputs = self._pending_outputs, []
        stored, removed = self._kv_cache.take_events()
        ended = time.perf_counter()
        duration_ms = (ended - max(step.began, self._collected_at)) * 1000  # not what ran beside the last one
        self._collected_at = ended
        if scheduled.sequences:
            self._steps.add(scheduled.batch, duration_ms)
        return StepResult(
            outputs=tuple(outputs),
            # An abort since the launch has given the blocks back.
            reservations=tuple(
                one for one in scheduled.reservations if self._scheduler.get(one.request_id) is not None
            ),
            progress=update.progress,
            first_scheduled=scheduled.first_scheduled,
            blocks_stored=stored,
            blocks_removed=removed,
            num_tokens=scheduled.batch.num_tokens,
            num_preempted=len(scheduled.preempted),
            started_at=step.now,
            duration_ms=duration_ms,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if scheduler, KV cache and sequences contradict each other."""
        self._scheduler.check_invariants()

    def _finish_step(self, step: LaunchedStep) -> SchedulerUpdate:
        error, sampled = step.error, None
        if step.logits is not None:
            try:
                sampled = self._sample(step.scheduled, step.logits)
            except Exception as sampling_error:
                error = sampling_error
        if sampled is not None:
            return self._scheduler.update_from_output(step.scheduled, sampled)
        if error is None:
            return SchedulerUpdate()
        request_ids = ", ".join(sequence.request_id for sequence in step.scheduled.sequences)
        logger.error("a step failed; its requests end with an error: %s", request_ids, exc_info=error)
        return self._scheduler.fail_step(step.scheduled, f"{type(error).__name__} in a model step: {error}")

    def _sample(self, scheduled: SchedulerOutput, logits: torch.Tensor) -> list[list[SampledToken]]:
        """New tokens of each scheduled sequence."""
        parts = scheduled.batch.sequences
        rows: list[SamplingRow] = []
        for sequence, part in zip(scheduled.sequences, parts, strict=True):
            end = part.start + len(part.token_ids)
            rows.extend(
                SamplingRow(
                    sampling=sequence.sampling,
                    position=position,
                    num_output_tokens=position - sequence.num_prompt_tokens,
                    logits_states=self._logits_states.get(sequence.request_id, ()),
                )
                for position in range(end - part.num_logits + 1, end + 1)
            )
        tokens = iter(self._sampler.sample(logits, rows))
        return [list(itertools.islice(tokens, part.num_logits)) for part in parts]

    def _take_output(self, output: SequenceOutput) -> None:
        self._pending_outputs.append(output)
        if output.finish_reason is not None:
            self._logits_states.pop(output.request_id, None)
            return
        for state in self._logits_states.get(output.request_id, ()):
            state.accept(output.token_ids)
