"""min_p, top-k and top-p as one threshold per row, so that the result does not depend on a sort's ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Truncated:
    """The ``width`` largest logits of each row, and which rows' candidates are all among them."""

    values: torch.Tensor  # fp32 [num_rows, width], what is cut off is -inf
    token_ids: torch.Tensor  # int64 [num_rows, width]
    is_complete: torch.Tensor  # bool [num_rows]


def is_truncating(sampling: SamplingParams) -> bool:
    """Whether top-k or top-p is on, for which the largest logits must be sorted."""
    return sampling.top_k > 0 or sampling.top_p < 1.0


def min_p_threshold(logits: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    """The smallest logit with p >= min_p * max p, fp32 [num_rows, 1]; -inf where min_p is off."""
    log_min_p = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows]
    return logits.amax(dim=1, keepdim=True) + _column(log_min_p, logits)


def truncate(logits: torch.Tensor, rows: Sequence[SamplingParams], width: int) -> Truncated:
    """Applies min_p, then top-k, then top-p to fp32 ``logits`` [num_rows, vocab], divided by temperature.

    Each is applied to the distribution that the one before has left. Looks at the ``width`` largest logits
    only: a row of which more would be kept comes back with ``is_complete`` False, and must be given again
    with a larger width (``vocab`` is always enough). Logits equal to the smallest kept one are kept too.
    """
    vocab_size = logits.shape[1]
    values, token_ids = logits.topk(width, dim=1)  # [num_rows, width], largest first
    threshold = min_p_threshold(logits, rows)  # [num_rows, 1]

    top_k = [min(row.top_k, vocab_size) if row.top_k > 0 else vocab_size for row in rows]
    has_top_k = _column([k < vocab_size for k in top_k], logits, torch.bool)
    kth = values.gather(1, _column([min(k, width) - 1 for k in top_k], logits, torch.int64))
    threshold = torch.where(has_top_k, torch.maximum(threshold, kth), threshold)

    # The mass that top-p is a share of: what min_p and top-k left. Beyond ``width`` only where top-k is off.
    kept = values.masked_fill(values < threshold, -torch.inf)
    kept_mass = kept.double().logsumexp(1, keepdim=True)
    if not all(k < vocab_size for k in top_k) and width < vocab_size:
        whole = logits.masked_fill(logits < threshold, -torch.inf)
        kept_mass = torch.where(has_top_k, kept_mass, whole.double().logsumexp(1, keepdim=True))
    probs = (kept.double() - kept_mass).exp()
    mass_before = probs.cumsum(1) - probs
    top_p = _column([row.top_p if row.top_p < 1.0 else math.inf for row in rows], logits, torch.float64)
    in_nucleus = (mass_before < top_p) & (kept > -torch.inf)
    in_nucleus[:, 0] = True  # never nothing
    smallest = values.masked_fill(~in_nucleus, torch.inf).amin(1, keepdim=True)
    threshold = torch.maximum(threshold, smallest)

    last = values[:, -1:]
    is_complete = (last < threshold) | (last == -torch.inf) | (width == vocab_size)
    return Truncated(values.masked_fill(values < threshold, -torch.inf), token_ids, is_complete[:, 0])


def _column(numbers: Sequence[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)
