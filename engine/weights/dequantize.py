"""Turns stored tensors into plain ones.

A quantised row is cut into blocks of 32 or 256 values. Each function below takes the raw bytes of some
blocks, ``[num_blocks, block_bytes]`` uint8, and returns their values, ``[num_blocks, block_elements]``
float32. The products of a block's scale and its integers are exact in float32 for all types but Q6_K, so
the results do not depend on whether a multiply and an add are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from engine.weights.stored_tensor import StoredTensor

# Elements handled at a time: the float32 intermediate of 1 MB stays in the CPU's second-level cache.
_CHUNK_ELEMENTS = 2**18


def _halves(raw: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """``count`` float16 values that start at the half-word ``first`` of each block, as float32."""
    return raw.view(torch.float16)[:, first : first + count].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """16 bytes per block to 32 integers: all low nibbles, then all high nibbles."""
    values = torch.empty(packed.shape[0], 2, 16)  # [num_blocks, low or high, 16]
    values[:, 0] = packed & 15
    values[:, 1] = packed >> 4
    return values.view(-1, 32)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Four bytes per block to 32 bits, each worth 16, as float32."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (raw[:, :, None] >> shifts) & 1  # [num_blocks, 4, 8]
    return bits.view(-1, 32).float().mul_(16)


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return raw[:, 2:].view(torch.int8).float().mul_(_halves(raw, 0, 1))


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    return _nibbles(raw[:, 2:]).sub_(8).mul_(_halves(raw, 0, 1))


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    scale_and_minimum = _halves(raw, 0, 2)
    return _nibbles(raw[:, 4:]).mul_(scale_and_minimum[:, :1]).add_(scale_and_minimum[:, 1:])


def _q5_0(raw: torch.Tensor) -> torch.Tensor:
    integers = _nibbles(raw[:, 6:]).add_(_fifth_bits(raw[:, 2:6]))
    return integers.sub_(16).mul_(_halves(raw, 0, 1))


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    scale_and_minimum = _halves(raw, 0, 2)
    integers = _nibbles(raw[:, 8:]).add_(_fifth_bits(raw[:, 4:8]))
    return integers.mul_(scale_and_minimum[:, :1]).add_(scale_and_minimum[:, 1:])


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of each block's eight sub-blocks, both ``[num_blocks, 8, 1]`` float32.

    Twelve bytes hold eight 6-bit scales and eight 6-bit minimums: the first four of each in the low six bits
    of bytes 0-3 and 4-7; the low nibbles of the other four in bytes 8-11, their top bits in bytes 0-7.
    """
    packed = raw[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1).float()
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1).float()
    factors = _halves(raw, 0, 2)
    return (scales * factors[:, :1])[:, :, None], (minimums * factors[:, 1:])[:, :, None]


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """128 bytes per block to ``[num_blocks, 8, 32]``: per 32 bytes the low nibbles, then the high ones."""
    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat([groups & 15, groups >> 4], dim=2).view(-1, 8, 32).float()


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    scales, minimums = _k_scales(raw)
    return _k_nibbles(raw[:, 16:]).mul_(scales).sub_(minimums).view(-1, 256)


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    scales, minimums = _k_scales(raw)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth_bits = (raw[:, 16:48][:, None, :] >> shifts) & 1  # [num_blocks, 8, 32]: bit j for sub-block j
    integers = _k_nibbles(raw[:, 48:]).add_(fifth_bits.float().mul_(16))
    return integers.mul_(scales).sub_(minimums).view(-1, 256)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    low = raw[:, :128].reshape(-1, 2, 1, 64)  # [num_blocks, half, 1, 64]
    nibbles = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32)
    top_bits = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3  # [num_blocks, 2, 4, 32]
    integers = (nibbles | (top_bits << 4)).float().sub_(32).view(-1, 16, 16)
    scales = raw[:, 192:208].view(torch.int8).float() * _halves(raw, 104, 1)  # [num_blocks, 16]
    return integers.mul_(scales[:, :, None]).view(-1, 256)


_DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "F64": lambda raw: raw.view(torch.float64),
        "F32": lambda raw: raw.view(torch.float32),
        "F16": lambda raw: raw.view(torch.float16),
        "BF16": lambda raw: raw.view(torch.bfloat16),
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
SUPPORTED_TYPES = tuple(_DECODERS)


def decode_blocks(raw: torch.Tensor, type_name: str) -> torch.Tensor:
    """Values of whole blocks: uint8 ``[n, block_bytes]`` to ``[n, block_elements]``.

    Float32 for the quantised types; plain numbers, blocks of one element, in their own dtype.
    """
    return _DECODERS[type_name](raw)


def dequantize(parts: Sequence[StoredTensor], dtype: torch.dtype) -> torch.Tensor:
    """The values of ``parts``, joined along the first axis, as a new tensor of ``dtype``.

    Their types must be among ``SUPPORTED_TYPES``, and may differ.
    """
    num_rows = sum(part.shape[0] for part in parts)
    values = torch.empty((num_rows, *parts[0].shape[1:]), dtype=dtype)
    start = 0
    for part in parts:
        _fill(values[start : start + part.shape[0]], part)
        start += part.shape[0]
    return values


def _fill(values: torch.Tensor, stored: StoredTensor) -> None:
    blocks = stored.data.reshape(-1, stored.block_bytes)
    flat = values.view(-1, stored.block_elements)
    chunk = _CHUNK_ELEMENTS // stored.block_elements
    for start in range(0, len(blocks), chunk):
        # Copied: torch takes no read-only memory, and not every offset in a file is aligned.
        raw = torch.from_numpy(blocks[start : start + chunk].copy())
        flat[start : start + chunk] = decode_blocks(raw, stored.type_name)
