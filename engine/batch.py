"""The data that flows between scheduler, model runner and sampler in one engine step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one sequence that this step computes.

    ``block_ids`` is the sequence's block table and covers ``start + len(token_ids)`` positions.
    """

    request_id: str
    token_ids: Sequence[int]  # to compute now
    start: int  # absolute position of token_ids[0] = num_computed_tokens
    block_ids: Sequence[int]
    num_logits: int  # positions, counted from the part's end, whose logits are sampled from


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: prefill chunks and single decode tokens, mixed."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_context_tokens(self) -> int:
        """Positions up to the end of each sequence's part, summed over the sequences."""
        return sum(sequence.start + len(sequence.token_ids) for sequence in self.sequences)
