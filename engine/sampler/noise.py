"""Counter-based random numbers: a pure function of (seed, position, token id).

A generator with a state would have to be saved and moved with its sequence. Here a sequence draws the same
numbers alone or in a batch, before or after preemption, and on whatever worker it continues.

The function is SplitMix64, read at any place instead of step by step:

    mix(x) = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    key    = mix(mix(seed) + (position + 1) * G)            G = 0x9E3779B97F4A7C15
    bits   = mix(key + (token_id + 1) * G)
    u      = ((bits >> 12) + 0.5) / 2**52                   in (0, 1), exact in float64

All arithmetic is modulo 2**64; shifts are logical.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def noise_key(seed: int, position: int) -> int:
    """The key of one sequence's draw at one absolute position, as a signed 64-bit integer."""
    return _signed(_mix(_mix(seed & _MASK) + (position + 1) * _GOLDEN & _MASK))


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in the open interval (0, 1), float64, of the broadcast shape of both int64 inputs."""
    bits = keys + (token_ids + 1) * _signed(_GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MULTIPLIER_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MULTIPLIER_2)
    bits = bits ^ _shift_right(bits, 31)
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64: ``argmax(logits + gumbel)`` is a draw from ``softmax(logits)``.

    float64, because the largest of a whole vocabulary's draws decides, and float32 is coarse near u = 1.
    """
    return uniform(keys, token_ids).log_().neg_().log_().neg_()


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & _MASK
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & _MASK
    return x ^ (x >> 31)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift; torch's own is arithmetic on int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
