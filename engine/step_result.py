"""What an engine's step gives back: plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks now held for a prompt that a peer will compute. The table covers prompt positions only."""

    request_id: str
    block_ids: tuple[int, ...]  # whole block table, cached blocks first
    num_cached_tokens: int  # a multiple of the block size: what this engine's own cache already holds


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """How far a ``prefill_only`` request has come; its KV is in the pool up to ``num_computed_tokens``."""

    request_id: str
    block_ids: tuple[int, ...]  # whole block table so far
    num_computed_tokens: int
    num_cached_tokens: int  # the prefix hit at first schedule
    is_first_chunk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """New tokens of one sequence. After one with ``finish_reason`` there are no more."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    is_refusal: bool = False  # the error lies in the request itself: another engine would say the same
    num_cached_tokens: int = 0  # prefix hit at first schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything one engine step did."""

    outputs: tuple[SequenceOutput, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    first_scheduled: tuple[str, ...] = ()  # requests computed for the first time in this step
    blocks_stored: tuple[bytes, ...] = ()  # hashes newly in the prefix cache
    blocks_removed: tuple[bytes, ...] = ()  # hashes evicted from it
    num_tokens: int = 0  # computed in this step
    num_preempted: int = 0
    started_at: float = 0.0  # monotonic seconds, when the step began
    duration_ms: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the step did nothing at all."""
        return not (
            self.outputs
            or self.reservations
            or self.progress
            or self.num_tokens
            or self.num_preempted
            or self.blocks_stored
            or self.blocks_removed
        )
