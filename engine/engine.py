"""One worker's engine: scheduler, KV cache, model runner and sampler behind one step function."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from cluster.block_hash import BlockHash
from cluster.kv_layout import KvLayout
from cluster.load import Load
from cluster.messages import TokenLogprobs
from engine.batch import Batch
from engine.kv_cache.kv_cache_manager import KvCacheManager
from engine.new_request import NewRequest
from engine.sampler.params_check import check_sampling_params
from engine.sampler.penalties import TokenCounts, needs_token_counts
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
        kv_layout: KvLayout,
        num_blocks: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        vocab_size: int,
        hash_root: Callable[[str], BlockHash],
        prefix_caching: bool = True,
    ) -> None:
        """``num_blocks`` includes the null block 0, which is never allocated.

        ``hash_root`` maps a request's cache salt to the root of its block-hash chain, usually
        ``functools.partial(root_hash, model_fingerprint, kv_layout.block_size)``. Raises ValueError on
        impossible sizes.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        self._kv_cache = KvCacheManager(
            num_blocks, kv_layout.block_size, hash_root, prefix_caching=prefix_caching
        )
        self._scheduler = Scheduler(
            scheduler_config,
            self._kv_cache,
            eos_token_ids=frozenset(eos_token_ids),
            max_model_len=max_model_len,
        )
        self._sampler = Sampler(eos_token_ids)
        self._token_counts: dict[str, TokenCounts] = {}  # of requests with a penalty
        self._pending_outputs: list[SequenceOutput] = []
        self._steps = StepHistory()

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
        if needs_token_counts(request.spec.sampling):
            self._token_counts[request.request_id] = TokenCounts(
                request.spec.prompt_token_ids, request.spec.output_token_ids
            )

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
        self._token_counts.pop(request_id, None)
        return True

    def activate(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> None:
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

    def fail_remote(self, request_id: str, num_landed_tokens: int = 0) -> None:
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
        """Schedules, computes and samples once. Does not raise for what the model or a request does.

        First tokens of requests activated since the last step are delivered by a step of their own, which
        computes nothing: they need not wait for the model. If the forward pass raises, the requests in that
        batch end with an error, and the engine goes on.
        """
        began = time.perf_counter()
        if self._pending_outputs:
            return self._deliver_pending(now)
        scheduled = self._scheduler.schedule(now)
        update = self._compute(scheduled) if scheduled.sequences else SchedulerUpdate()
        for output in update.outputs:
            self._take_output(output)
        delivered = self._deliver_pending(now)
        duration_ms = (time.perf_counter() - began) * 1000
        if scheduled.sequences:
            self._steps.add(scheduled.batch, duration_ms)
        return replace(
            delivered,
            reservations=scheduled.reservations,
            progress=update.progress,
            first_scheduled=scheduled.first_scheduled,
            num_tokens=scheduled.batch.num_tokens,
            num_preempted=len(scheduled.preempted),
            duration_ms=duration_ms,
        )

    def _deliver_pending(self, now: float) -> StepResult:
        """Outputs and cache events gathered since the last step, as a step that computed nothing."""
        outputs, self._pending_outputs = self._pending_outputs, []
        stored, removed = self._kv_cache.take_events()
        return StepResult(
            outputs=tuple(outputs), blocks_stored=stored, blocks_removed=removed, started_at=now
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if scheduler, KV cache and sequences contradict each other."""
        self._scheduler.check_invariants()

    def _compute(self, scheduled: SchedulerOutput) -> SchedulerUpdate:
        try:
            sampled = self._forward_and_sample(scheduled)
        except Exception as error:
            request_ids = ", ".join(sequence.request_id for sequence in scheduled.sequences)
            logger.exception("a step failed; its requests end with an error: %s", request_ids)
            return self._scheduler.fail_step(scheduled, f"{type(error).__name__} in a model step: {error}")
        return self._scheduler.update_from_output(scheduled, sampled)

    def _forward_and_sample(self, scheduled: SchedulerOutput) -> list[list[SampledToken]]:
        """New tokens of each scheduled sequence."""
        logits = self._runner.forward(scheduled.batch)
        rows: list[SamplingRow] = []
        for sequence, part in zip(scheduled.sequences, scheduled.batch.sequences, strict=True):
            end = part.start + len(part.token_ids)
            rows.extend(
                SamplingRow(
                    sampling=sequence.sampling,
                    position=position,
                    num_output_tokens=position - sequence.num_prompt_tokens,
                    token_counts=self._token_counts.get(sequence.request_id),
                )
                for position in range(end - part.num_logits + 1, end + 1)
            )
        tokens = iter(self._sampler.sample(logits, rows))
        return [list(itertools.islice(tokens, part.num_logits)) for part in scheduled.batch.sequences]

    def _take_output(self, output: SequenceOutput) -> None:
        self._pending_outputs.append(output)
        if output.finish_reason is not None:
            self._token_counts.pop(output.request_id, None)
        elif output.request_id in self._token_counts:
            for token_id in output.token_ids:
                self._token_counts[output.request_id].add(token_id)
