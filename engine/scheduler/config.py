"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduler.prefill_policy import PREFILL_POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits on one step and on the queues. Wrong values raise ValueError."""

    max_num_batched_tokens: int  # token budget of one step
    max_num_seqs: int  # sequences running or reserved at once
    max_num_waiting: int  # requests waiting to be admitted; more are refused
    long_prefill_token_threshold: int  # most tokens of one prompt in a step while others wait; 0: no limit
    prefill_policy: str  # a key of PREFILL_POLICIES
    ageing_tokens_per_second: float  # shortest_remaining: how fast waiting outweighs length
    watermark: float  # share of the blocks that admission leaves free for running sequences to grow

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Each running sequence needs one token per step, or the last ones would never get any.
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens},"
                f" must be at least max_num_seqs ({self.max_num_seqs})"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, must be at least 0"
            )
        if self.prefill_policy not in PREFILL_POLICIES:
            raise ValueError(
                f"prefill_policy is {self.prefill_policy!r}, must be one of {', '.join(PREFILL_POLICIES)}"
            )
        if not self.ageing_tokens_per_second > 0:
            raise ValueError(
                f"ageing_tokens_per_second is {self.ageing_tokens_per_second}, must be above 0:"
                " without ageing a long prompt may wait for ever"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}, must be at least 0 and below 1")
