"""Tensors as files hold them."""

from __future__ import annotations

import numpy as np
import torch

from engine.weights.stored_tensor import StoredTensor
from model_files.gguf import TENSOR_TYPES

SIZES = {kind.name: (kind.block_elements, kind.block_bytes) for kind in TENSOR_TYPES.values()}
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def stored(tensor: torch.Tensor) -> StoredTensor:
    """A tensor of plain numbers."""
    data = tensor.contiguous().view(torch.uint8).numpy()
    return StoredTensor(NAMES[tensor.dtype], tuple(tensor.shape), data)


def stored_as(type_name: str, shape: tuple[int, ...], data: bytes) -> StoredTensor:
    """A tensor of any type from its bytes; read-only, as one of a mapped file."""
    raw = np.frombuffer(data, dtype=np.uint8).reshape(*shape[:-1], -1)
    return StoredTensor(type_name, shape, raw)
