"""What changes a sequence's logits depending on the tokens it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cluster.sequence_spec import SequenceSpec
from engine.sampler.penalties import Penalties, has_penalties


class LogitsState(Protocol):
    """One sequence's state of one such kind, kept from token to token."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that the sequence has been given."""

    def apply(self, logits: torch.Tensor) -> None:
        """Changes the fp32 ``logits`` [vocab] of the sequence's next token in place."""


def logits_states(spec: SequenceSpec) -> tuple[LogitsState, ...]:
    """Those that ``spec`` asks for, its output so far taken in: the one place to choose them."""
    return (Penalties(spec),) if has_penalties(spec.sampling) else ()
