"""Rotary position embeddings and the ways to stretch them over longer contexts."""

from __future__ import annotations

import math

import torch

from engine.models.config import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, ``[head_dim / 2]`` float32, and the factor on cos and sin (1 but for YaRN)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    unscaled = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return unscaled, 1.0
    if isinstance(scaling, LinearScaling):
        return unscaled / scaling.factor, 1.0
    if isinstance(scaling, FrequencyDivisors):
        return unscaled / torch.tensor(scaling.divisors, dtype=torch.float32), 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(unscaled, scaling), 1.0
    return _yarn(unscaled, scaling, rope.theta, head_dim)


def _llama3(unscaled: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position * unscaled / (2 * math.pi)  # over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * unscaled / scaling.factor + keep * unscaled


def _yarn(
    unscaled: torch.Tensor, scaling: YarnScaling, theta: float, head_dim: int
) -> tuple[torch.Tensor, float]:
    def dimension_with(turns: float) -> float:
        """The (fractional) index of the frequency that turns so often within the original context."""
        wavelengths = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    interpolate = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolate = interpolate.clamp(0.0, 1.0)
    frequencies = unscaled / scaling.factor * interpolate + unscaled * (1 - interpolate)
    return frequencies, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


class RotaryTables:
    """cos and sin for every position, computed once: looked up, they are the same in every step."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> None:
        frequencies, factor = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor  # [max_model_len, head_dim / 2]
        self._cos = torch.cat([cos, cos], dim=-1).to(device)
        self._sin = torch.cat([-sin, sin], dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as ``Backend.rotary`` takes them, each ``[num_tokens, 1, head_dim]`` float32."""
        return self._cos[positions][:, None], self._sin[positions][:, None]
