"""When a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ended. ``stop_reason`` is the stop token id, None for end-of-sequence tokens."""

    status: SequenceStatus
    stop_reason: int | None = None


def check_stop(sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> Stop | None:
    """Whether the sequence ends with its last token. ``max_model_len`` is in tokens, prompt included."""
    sampling, token_id = sequence.sampling, sequence.all_token_ids[-1]
    if sequence.num_output_tokens > sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return Stop(SequenceStatus.FINISHED_STOPPED)
        if token_id in sampling.stop_token_ids:
            return Stop(SequenceStatus.FINISHED_STOPPED, token_id)
    if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= max_model_len:
        return Stop(SequenceStatus.FINISHED_LENGTH_CAPPED)
    return None
