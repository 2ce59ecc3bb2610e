"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.messages import TokenLogprobs
from cluster.sampling_params import SamplingParams
from engine.sampler.logits_state import LogitsState
from engine.sampler.noise import gumbel, noise_key
from engine.sampler.truncation import Truncated, is_truncating, min_p_threshold, truncate
from engine.sequence import SampledToken

_FAST_WIDTH = 1024  # logits that are sorted at first; sorting a whole vocabulary costs 50 times as much


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What the sampler must know about the sequence behind one row of logits."""

    sampling: SamplingParams
    position: int  # absolute position of the token to be sampled
    num_output_tokens: int  # so far
    logits_states: Sequence[LogitsState] = ()


class Sampler:
    """Samples one token per row. Stateless: equal rows give equal tokens, whatever else is in the batch.

    In this order: (1) logit_bias; (2) end-of-sequence and stop tokens masked until min_tokens; (3)
    the row's logits states, as penalties; (4) the most likely token where temperature is 0, else (5)
    division by temperature; (6) min_p; (7) top-k; (8) top-p; (9) Gumbel-max with noise keyed by (seed,
    position, token id).
    Logprobs are of the raw logits.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Samples from fp32 ``logits`` [num_rows, vocab], which stay unchanged.

        A row with a NaN, with +inf, or without any finite logit gives a SampledToken with an error, and so
        does a row whose parameters forbid every token, which is a refusal. Raises ValueError if the shape
        does not fit ``rows``.
        """
        if logits.dim() != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits have shape {list(logits.shape)}, must be [{len(rows)}, vocab]")
        if not rows:
            return []
        raw = logits.float()
        errors = _row_errors(raw, "the model gave logits that are not finite")
        adjusted = self._adjust(raw, rows)
        refused: set[int] = set()
        if adjusted is not raw:
            for index, error in enumerate(_row_errors(adjusted, "no token is allowed by the parameters")):
                if error is not None and errors[index] is None:
                    errors[index] = error
                    refused.add(index)
        token_ids = _choose(adjusted, rows, [index for index, error in enumerate(errors) if error is None])
        logprobs = _logprobs(raw, rows, token_ids)
        return [
            SampledToken(token_id=-1, error=error, is_refusal=index in refused)
            if error is not None
            else SampledToken(token_id=token_ids[index], logprobs=logprobs.get(index))
            for index, error in enumerate(errors)
        ]

    def _adjust(self, raw: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Steps 1 to 3, on a copy if there is anything to do."""
        adjusted = raw
        for index, row in enumerate(rows):
            masked = self._masked_token_ids(row)
            if not (row.sampling.logit_bias or masked or row.logits_states):
                continue
            if adjusted is raw:
                adjusted = raw.clone()
            logits = adjusted[index]
            if row.sampling.logit_bias:
                token_ids = torch.tensor(list(row.sampling.logit_bias), device=raw.device)
                bias = list(row.sampling.logit_bias.values())
                logits[token_ids] += torch.tensor(bias, dtype=torch.float32, device=raw.device)
            if masked:
                logits[torch.tensor(masked, device=raw.device)] = -torch.inf
            for state in row.logits_states:
                state.apply(logits)
        return adjusted

    def _masked_token_ids(self, row: SamplingRow) -> list[int]:
        if row.num_output_tokens >= row.sampling.min_tokens:
            return []
        return [*(() if row.sampling.ignore_eos else self._eos_token_ids), *row.sampling.stop_token_ids]


def _row_errors(logits: torch.Tensor, error: str) -> list[str | None]:
    """``error`` for each row whose largest logit is NaN or infinite; amax lets NaN through."""
    is_finite: list[bool] = torch.isfinite(logits.amax(dim=1)).tolist()
    return [None if finite else error for finite in is_finite]


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow], wanted: Sequence[int]) -> dict[int, int]:
    """Steps 4 to 9 for the ``wanted`` rows: token id by row."""
    greedy = [index for index in wanted if rows[index].sampling.is_greedy]
    random = [index for index in wanted if not rows[index].sampling.is_greedy]
    sorting = [index for index in random if is_truncating(rows[index].sampling)]
    plain = [index for index in random if not is_truncating(rows[index].sampling)]
    chosen: dict[int, int] = {}
    if greedy:
        chosen.update(zip(greedy, logits[greedy].argmax(dim=1).tolist(), strict=True))
    if plain:
        scaled = _scaled(logits, rows, plain)
        scaled = scaled.masked_fill(scaled < min_p_threshold(scaled, _params(rows, plain)), -torch.inf)
        token_ids = torch.arange(logits.shape[1], device=logits.device).expand_as(scaled)
        chosen.update(_gumbel_max(Truncated(scaled, token_ids, torch.ones(0)), rows, plain))
    vocab_size = logits.shape[1]
    width = min(vocab_size, _FAST_WIDTH)
    while sorting:
        truncated = truncate(_scaled(logits, rows, sorting), _params(rows, sorting), width)
        tokens = _gumbel_max(truncated, rows, sorting)
        is_complete: list[bool] = truncated.is_complete.tolist()
        done = [index for index, complete in zip(sorting, is_complete, strict=True) if complete]
        chosen.update((index, tokens[index]) for index in done)
        sorting = [index for index in sorting if index not in chosen]
        width = vocab_size
    return chosen


def _scaled(logits: torch.Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> torch.Tensor:
    temperatures = torch.tensor([rows[index].sampling.temperature for index in indices], device=logits.device)
    return logits[indices] / temperatures.unsqueeze(1)  # [num_indices, vocab]


def _params(rows: Sequence[SamplingRow], indices: Sequence[int]) -> list[SamplingParams]:
    return [rows[index].sampling for index in indices]


def _gumbel_max(candidates: Truncated, rows: Sequence[SamplingRow], indices: Sequence[int]) -> dict[int, int]:
    keys = torch.tensor(
        [noise_key(rows[index].sampling.seed, rows[index].position) for index in indices],
        dtype=torch.int64,
        device=candidates.values.device,
    ).unsqueeze(1)  # [num_indices, 1]
    scores = gumbel(keys, candidates.token_ids).add_(candidates.values)  # [num_indices, width]
    best = scores.argmax(dim=1, keepdim=True)
    token_ids: list[int] = candidates.token_ids.gather(1, best).squeeze(1).tolist()
    return dict(zip(indices, token_ids, strict=True))


def _logprobs(
    raw: torch.Tensor, rows: Sequence[SamplingRow], token_ids: dict[int, int]
) -> dict[int, TokenLogprobs]:
    indices = [index for index in token_ids if rows[index].sampling.logprobs is not None]
    if not indices:
        return {}
    logprobs = raw[indices].log_softmax(dim=1)  # [num_indices, vocab]
    sampled = torch.tensor([token_ids[index] for index in indices], device=raw.device).unsqueeze(1)
    sampled_logprobs = logprobs.gather(1, sampled)  # [num_indices, 1]
    ranks: list[int] = ((logprobs > sampled_logprobs).sum(dim=1) + 1).tolist()
    values: list[float] = sampled_logprobs.squeeze(1).tolist()
    counts = [min(rows[index].sampling.logprobs or 0, raw.shape[1]) for index in indices]
    top = logprobs.topk(max(counts), dim=1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return {
        index: TokenLogprobs(
            token_id=token_ids[index],
            logprob=values[row],
            rank=ranks[row],
            top=tuple(zip(top_ids[row][: counts[row]], top_values[row][: counts[row]], strict=True)),
        )
        for row, index in enumerate(indices)
    }
