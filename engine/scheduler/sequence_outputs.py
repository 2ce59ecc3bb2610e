"""What a step tells of one sequence: its new token, or why it ended."""

from __future__ import annotations

from cluster.messages import FinishReason
from engine.sequence import SampledToken, Sequence, SequenceStatus
from engine.step_result import SequenceOutput

FINISH_REASONS: dict[SequenceStatus, FinishReason] = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_ERROR: "error",
}


def token_output(
    sequence: Sequence,
    token: SampledToken,
    *,
    finish_reason: FinishReason | None,
    stop_reason: int | None,
) -> SequenceOutput:
    """One more token of ``sequence``, perhaps its last."""
    return SequenceOutput(
        request_id=sequence.request_id,
        token_ids=(token.token_id,),
        logprobs=None if token.logprobs is None else (token.logprobs,),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=sequence.num_cached_tokens or 0,
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
