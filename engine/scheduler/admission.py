"""Who is admitted next, and whether there is room."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.kv_cache.kv_cache_manager import KvCacheManager
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.prefill_policy import PREFILL_POLICIES, PrefillCandidate
from engine.sequence import Sequence, SequencePhase, SequenceStatus


class Admission:
    """Orders prompts by policy, and gives the admitted ones their blocks."""

    def __init__(self, config: SchedulerConfig, kv_cache: KvCacheManager) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._policy = PREFILL_POLICIES[config.prefill_policy]
        self._watermark_blocks = math.ceil(config.watermark * kv_cache.num_total_blocks)

    def prefill_candidates(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence], now: float
    ) -> list[Sequence]:
        """Prompts with tokens left to schedule, in the policy's order at ``now`` (seconds)."""
        started = [
            sequence
            for sequence in running
            if sequence.phase is SequencePhase.PREFILL and sequence.num_unscheduled_tokens > 0
        ]
        return sorted([*started, *waiting], key=lambda sequence: self._key(sequence, now))

    def num_remaining_tokens(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` neither computed nor in flight nor, as far as is known, cached."""
        if sequence.num_computed_tokens > 0 or sequence.status is SequenceStatus.RUNNING:
            return sequence.num_unscheduled_tokens
        return sequence.num_tokens - self._kv_cache.refresh_cache_hit_hint(sequence)

    def num_prefill_tokens(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> int:
        """Tokens still to be computed here as prompt. What a peer computes does not count."""
        started = sum(
            sequence.num_uncomputed_tokens for sequence in running if sequence.phase is SequencePhase.PREFILL
        )
        return started + sum(
            self.num_remaining_tokens(sequence) for sequence in waiting if not sequence.remote_prefill
        )

    def allocate_prompt(self, sequence: Sequence, num_admitted: int) -> bool:
        """Gives a waiting sequence blocks for all its tokens, cached ones first. False if it must wait.

        ``num_admitted`` is the number of sequences that run or have reservations.
        """
        if num_admitted >= self._config.max_num_seqs:
            return False
        cached = self._kv_cache.find_cached_blocks(sequence)
        # The watermark is for others to grow into; with nobody else there, it would only be in the way.
        keep_free = self._watermark_blocks if num_admitted else 0
        if not self._kv_cache.allocate(
            sequence,
            sequence.num_tokens,
            cached_block_ids=cached,
            keep_free=keep_free,
            for_remote_writer=sequence.remote_prefill,
        ):
            return False
        sequence.num_computed_tokens = len(cached) * self._kv_cache.block_size
        if sequence.num_cached_tokens is None:
            # Not after a preemption: finding one's own blocks again says nothing about the prefix cache.
            sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.num_prompt_tokens_counted = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self._kv_cache.count_lookup(sequence.num_tokens, sequence.num_computed_tokens)
        return True

    def _key(self, sequence: Sequence, now: float) -> tuple[float, int]:
        return self._policy(
            PrefillCandidate(
                arrival_index=sequence.arrival_index,
                num_remaining_tokens=self.num_remaining_tokens(sequence),
                waited_s=now - sequence.arrived_at,
                ageing_tokens_per_second=self._config.ageing_tokens_per_second,
            )
        )
