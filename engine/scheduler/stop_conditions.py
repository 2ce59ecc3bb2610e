"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.sequence import SampledToken, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ended. ``stop_reason`` is the stop token id, None for end-of-sequence tokens."""

    status: SequenceStatus
    stop_reason: int | None = None


def append_until_stop(
    sequence: Sequence,
    tokens: SequenceOf[SampledToken],
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> tuple[SequenceOf[SampledToken], Stop | None]:
    """Appends ``tokens`` up to the first that ends the sequence. Returns those appended, and why it ends.

    ``max_model_len`` is in tokens, prompt included.
    """
    for index, token in enumerate(tokens):
        sequence.all_token_ids.append(token.token_id)
        stop = _check_stop(sequence, eos_token_ids, max_model_len)
        if stop is not None:
            return tokens[: index + 1], stop
    return tokens, None


def _check_stop(sequence: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> Stop | None:
    """Whether the sequence ends with its last token."""
    sampling, token_id = sequence.sampling, sequence.all_token_ids[-1]
    if sequence.num_output_tokens > sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return Stop(SequenceStatus.FINISHED_STOPPED)
        if token_id in sampling.stop_token_ids:
            return Stop(SequenceStatus.FINISHED_STOPPED, token_id)
    if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= max_model_len:
        return Stop(SequenceStatus.FINISHED_LENGTH_CAPPED)
    if sequence.prefill_only:  # one token is all that was asked for
        return Stop(SequenceStatus.FINISHED_LENGTH_CAPPED)
    return None
