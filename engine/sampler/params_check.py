"""Refuses sampling parameters that would harm more than their own request."""

from __future__ import annotations

import math

from cluster.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

_MAX_LOGPROBS = 128


def check_sampling_params(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError naming the parameter, its value and what is allowed."""
    ranges: tuple[tuple[str, float, bool, str], ...] = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        (
            "min_tokens",
            sampling.min_tokens,
            0 <= sampling.min_tokens <= sampling.max_tokens,
            f"from 0 to max_tokens ({sampling.max_tokens})",
        ),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "at least 0 and finite"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0 (0: off)"),
        ("top_p", sampling.top_p, 0 <= sampling.top_p <= 1, "from 0 to 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            abs(sampling.frequency_penalty) <= MAX_PENALTY,
            f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}",
        ),
        (
            "presence_penalty",
            sampling.presence_penalty,
            abs(sampling.presence_penalty) <= MAX_PENALTY,
            f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}",
        ),
    )
    for name, value, is_allowed, allowed in ranges:
        if not is_allowed:
            raise ValueError(f"{name} is {value}, must be {allowed}")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= _MAX_LOGPROBS:
        raise ValueError(f"logprobs is {sampling.logprobs}, must be from 0 to {_MAX_LOGPROBS}")
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"logit_bias names token {token_id}, must be from 0 to {vocab_size - 1}")
        if not abs(bias) <= MAX_LOGIT_BIAS and bias != -math.inf:
            raise ValueError(
                f"logit_bias of token {token_id} is {bias}, must be from {-MAX_LOGIT_BIAS:g} to"
                f" {MAX_LOGIT_BIAS:g}, or -inf to forbid it"
            )
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"stop_token_ids has token {token_id}, must be from 0 to {vocab_size - 1}")
