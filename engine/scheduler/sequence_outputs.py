"""What a step tells of one sequence: its new tokens, how far its prefill is, or why it ended."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from cluster.messages import FinishReason
from engine.scheduler.stop_conditions import Stop
from engine.sequence import SampledToken, Sequence, SequenceStatus
from engine.step_result import PrefillProgress, SequenceOutput

_FINISH_REASONS: dict[SequenceStatus, FinishReason] = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_ERROR: "error",
}


def tokens_output(sequence: Sequence, tokens: SequenceOf[SampledToken], stop: Stop | None) -> SequenceOutput:
    """New tokens of ``sequence``, at least one; with ``stop`` they are its last."""
    logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return SequenceOutput(
        request_id=sequence.request_id,
        token_ids=tuple(token.token_id for token in tokens),
        logprobs=logprobs or None,
        finish_reason=_FINISH_REASONS[stop.status] if stop else None,
        stop_reason=stop.stop_reason if stop else None,
        num_cached_tokens=sequence.num_cached_tokens or 0,
    )


def prefill_progress(
    sequence: Sequence, block_ids: tuple[int, ...], *, is_first_chunk: bool
) -> PrefillProgress:
    """How far ``sequence`` is; ``block_ids`` is its whole block table so far."""
    return PrefillProgress(
        request_id=sequence.request_id,
        block_ids=block_ids,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        is_first_chunk=is_first_chunk,
    )


def error_output(sequence: Sequence, error: str, *, is_refusal: bool = False) -> SequenceOutput:
    """The end of a sequence that failed, or, with ``is_refusal``, that cannot be continued anywhere."""
    return SequenceOutput(
        request_id=sequence.request_id,
        token_ids=(),
        finish_reason="error",
        error=error,
        is_refusal=is_refusal,
        num_cached_tokens=sequence.num_cached_tokens or 0,
    )
