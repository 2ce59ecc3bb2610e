"""Repetition, frequency and presence penalties, with counts kept from token to token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import SequenceSpec


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


class Penalties:
    """A LogitsState: the distinct tokens of one sequence, and how often each is in its output.

    Sparse, in buffers that grow by doubling: accepting a token is O(1), applying the penalties is one gather
    and one scatter over the distinct tokens.
    """

    def __init__(self, spec: SequenceSpec) -> None:
        self._sampling = spec.sampling
        distinct = dict.fromkeys(spec.prompt_token_ids)
        self._index = {token_id: index for index, token_id in enumerate(distinct)}
        self._token_ids = torch.tensor(list(self._index), dtype=torch.int64)  # [capacity]
        self._output_counts = torch.zeros(len(self._index), dtype=torch.float32)  # [capacity]
        self.accept(spec.output_token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Counts output tokens."""
        for token_id in token_ids:
            index = self._index.setdefault(token_id, len(self._index))
            if index == len(self._token_ids):
                room = max(64, index)
                self._token_ids = torch.cat([self._token_ids, torch.zeros(room, dtype=torch.int64)])
                self._output_counts = torch.cat([self._output_counts, torch.zeros(room)])
            self._token_ids[index] = token_id
            self._output_counts[index] += 1

    def apply(self, logits: torch.Tensor) -> None:
        """Over prompt and output tokens: x / r where x > 0, else x * r. Then over output tokens:
        x - frequency_penalty * count - presence_penalty.
        """
        sampling, num_distinct = self._sampling, len(self._index)
        token_ids = self._token_ids[:num_distinct].to(logits.device)
        counts = self._output_counts[:num_distinct].to(logits.device)
        before = x = logits[token_ids]  # [num_distinct]
        if sampling.repetition_penalty != 1.0:
            x = torch.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty)
        x = x - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        # A penalty makes a token unlikely or likely; only a mask may forbid it, and no token gets +inf.
        largest = torch.finfo(x.dtype).max
        logits[token_ids] = torch.where(before == -torch.inf, before, x.clamp(-largest, largest))
