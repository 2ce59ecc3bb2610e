"""Every GGUF type against a reference that reads one value at a time, written from its description."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
import torch

from engine.weights.dequantize import SUPPORTED_TYPES, dequantize
from tests.engine.stored import NAMES, SIZES, stored, stored_as


def half(block: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", block, offset)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q8_0(block: bytes, i: int) -> float:
    return half(block, 0) * signed(block[2 + i])


def nibble(block: bytes, offset: int, i: int) -> int:
    byte = block[offset + i % 16]
    return byte & 15 if i < 16 else byte >> 4


def fifth(block: bytes, offset: int, i: int) -> int:
    return (struct.unpack_from("<I", block, offset)[0] >> i & 1) << 4


def q4_0(block: bytes, i: int) -> float:
    return half(block, 0) * (nibble(block, 2, i) - 8)


def q4_1(block: bytes, i: int) -> float:
    return half(block, 0) * nibble(block, 4, i) + half(block, 2)


def q5_0(block: bytes, i: int) -> float:
    return half(block, 0) * ((nibble(block, 6, i) | fifth(block, 2, i)) - 16)


def q5_1(block: bytes, i: int) -> float:
    return half(block, 0) * (nibble(block, 8, i) | fifth(block, 4, i)) + half(block, 2)


def k_scale_and_minimum(block: bytes, j: int) -> tuple[int, int]:
    packed = block[4:16]
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4), (packed[j + 4] >> 4) | (packed[j] >> 6 << 4)


def k_quant(block: bytes, i: int, offset: int) -> int:
    byte = block[offset + i // 64 * 32 + i % 32]
    return byte & 15 if i % 64 < 32 else byte >> 4


def q4_k(block: bytes, i: int) -> float:
    scale, minimum = k_scale_and_minimum(block, i // 32)
    return half(block, 0) * scale * k_quant(block, i, 16) - half(block, 2) * minimum


def q5_k(block: bytes, i: int) -> float:
    scale, minimum = k_scale_and_minimum(block, i // 32)
    value = k_quant(block, i, 48) | (block[16 + i % 32] >> (i // 32) & 1) << 4
    return half(block, 0) * scale * value - half(block, 2) * minimum


def q6_k(block: bytes, i: int) -> float:
    part, inside = divmod(i, 128)
    quarter, column = divmod(inside, 32)
    low = block[part * 64 + column + 32 * (quarter % 2)]
    low = low & 15 if quarter < 2 else low >> 4
    high = block[128 + part * 32 + column] >> (2 * quarter) & 3
    return half(block, 208) * signed(block[192 + i // 16]) * ((low | high << 4) - 32)


REFERENCES: dict[str, Callable[[bytes, int], float]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
SCALE_OFFSETS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(type_name: str, count: int, seed: int) -> bytes:
    """Random bits everywhere but in the float16 scales, which are ordinary numbers."""
    rng = random.Random(seed)
    blocks = bytearray()
    for _ in range(count):
        block = bytearray(rng.randbytes(SIZES[type_name][1]))
        for offset in SCALE_OFFSETS.get(type_name, (0,)):
            struct.pack_into("<e", block, offset, rng.uniform(-2, 2))
        blocks += block
    return bytes(blocks)


def test_every_quantised_type_has_a_reference() -> None:
    assert set(SUPPORTED_TYPES) == {*REFERENCES, *NAMES.values()}


@pytest.mark.parametrize("type_name", REFERENCES)
def test_quantised_types(type_name: str) -> None:
    elements, num_bytes = SIZES[type_name]
    data = random_blocks(type_name, 12, seed=3)
    values = dequantize([stored_as(type_name, (3, 4 * elements), data)], torch.float32)
    expected = [
        REFERENCES[type_name](data[index * num_bytes : (index + 1) * num_bytes], i)
        for index in range(12)
        for i in range(elements)
    ]
    torch.testing.assert_close(
        values.flatten(), torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-6
    )


def test_chunks_of_a_large_tensor_join_without_a_seam() -> None:
    data = random_blocks("Q4_1", 64, seed=5) * 300  # more than one chunk
    values = dequantize([stored_as("Q4_1", (300, 64 * 32), data)], torch.float32)
    assert torch.equal(values, values[:1].expand(300, -1))


@pytest.mark.parametrize("dtype", NAMES)
def test_plain_types(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7).to(dtype)
    assert torch.equal(dequantize([stored(tensor)], torch.float32), tensor.float())


def test_tensors_of_several_types_join() -> None:
    data = random_blocks("Q4_0", 6, seed=1)
    quantised, plain = stored_as("Q4_0", (3, 64), data), stored(torch.randn(2, 64).bfloat16())
    joined = dequantize([quantised, plain], torch.bfloat16)
    assert torch.equal(joined[:3], dequantize([quantised], torch.float32).bfloat16())
    assert torch.equal(joined[3:], dequantize([plain], torch.bfloat16))
