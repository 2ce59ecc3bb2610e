"""Linear layers on the CPU: one kernel per number format, each exact by row.

*Exact by row*: a row's result has the same bits whichever rows are multiplied with it, and however many. The
libraries do not promise that. It holds because each kernel here avoids the numbers of rows for which its
library adds up an output element in another order; which those are was found by trying them all
(tests/engine/ops/test_exactness.py) on processors with AVX2, with AVX-512 and with AMX.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.ops.backend import PackedLinear
from engine.ops.number_formats import NumberFormat, check_float16_range, has_native_bfloat16

# The number of rows oneDNN picks a weight layout for. Any number of rows may be multiplied with the result.
_PACK_ROWS = 16
_HIGHEST_EXACT_ISA = "AVX512_CORE_FP16"  # the one below AMX
# FBGEMM cuts rows into strips of up to 6 (AVX2) or 14 (AVX-512). With AVX2 its strips of one and of two rows
# add up in another order; a multiple of three rows is never cut so that one of these is left.
_FLOAT16_ROW_MULTIPLE = 3


class LinearKernel(Protocol):
    """Multiplies by weights in a layout of its own."""

    @property
    def name(self) -> str:
        """For people: which library, and what it multiplies."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Lays ``weight``, ``[out_features, in_features]``, out. The caller gives the tensor up."""

    def multiply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """``x @ weight.T + bias`` of ``[num_rows, in_features]``, exact by row."""


class OneDnnLinear:
    """oneDNN in one dtype. A single row would take a vector kernel that adds up in another order.

    Its AMX kernels cut the sum by the number of rows and threads, in a way that no padding avoids. oneDNN
    reads ``ONEDNN_MAX_CPU_ISA`` when it is first used; who sets it to allow AMX gives up exactness for speed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _HIGHEST_EXACT_ISA)
        self._dtype = dtype
        self.name = f"oneDNN {str(dtype).removeprefix('torch.')}"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        out_features, in_features = weight.shape
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._dtype), _PACK_ROWS)
        return PackedLinear(reordered, _as(bias, self._dtype), in_features, out_features)

    def multiply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        num_rows = x.shape[0]
        x = x.to(self._dtype)
        if num_rows == 1:
            x = x.expand(2, -1).contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
        return out[:num_rows]


class FbgemmFloat16Linear:
    """Float32 rows by weights rounded to float16, summed in float32."""

    name = "FBGEMM float16 weights, float32 activations"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Raises WeightRangeError where a weight is beyond float16's range: FBGEMM would clip it."""
        out_features, in_features = weight.shape
        weight = weight.float()
        check_float16_range(weight)
        packed = torch.ops.quantized.linear_prepack_fp16(weight, _as(bias, torch.float32))
        return PackedLinear(packed, None, in_features, out_features)  # the bias is packed with it

    def multiply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % _FLOAT16_ROW_MULTIPLE
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed.weight)
        return out[:num_rows]


class EmulatedBfloat16Linear:
    """What a bfloat16 kernel computes, by a float32 kernel: for CPUs without bfloat16 in hardware.

    Twice the memory, at float32's speed; torch's own bfloat16 fallback is slower and not exact by row.
    """

    def __init__(self, float32: LinearKernel) -> None:
        self._float32 = float32
        self.name = f"{float32.name}, rounded to bfloat16"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        rounded = weight.to(torch.bfloat16).float()
        return self._float32.pack(rounded, None if bias is None else bias.to(torch.bfloat16).float())

    def multiply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._float32.multiply(x.to(torch.bfloat16).float(), packed).to(torch.bfloat16)


class RowByRowLinear:
    """Float32 in plain PyTorch, one row at a time: where torch is built without oneDNN. Slow in prefill."""

    name = "PyTorch float32, row by row"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        out_features, in_features = weight.shape
        return PackedLinear(weight.float(), _as(bias, torch.float32), in_features, out_features)

    def multiply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed.weight, torch.Tensor)
        out = torch.empty(x.shape[0], packed.out_features)
        for index in range(x.shape[0]):
            # Copied: BLAS may add up in another order where a row does not begin at an aligned address.
            row = x[index : index + 1].to(torch.float32, copy=True)
            out[index : index + 1] = F.linear(row, packed.weight, packed.bias)
        return out


def linear_kernel(number_format: NumberFormat) -> LinearKernel:
    """The kernel of a model's layers. float16 must be available, see ``number_formats``."""
    if number_format.weights is torch.float16:
        return FbgemmFloat16Linear()
    if number_format.weights is torch.bfloat16:
        if _has_onednn() and has_native_bfloat16() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return OneDnnLinear(torch.bfloat16)
        return EmulatedBfloat16Linear(_float32_kernel())
    return _float32_kernel()


def head_kernel(number_format: NumberFormat) -> LinearKernel:
    """The kernel of the output head, whose logits are float32 and never rounded."""
    return _float32_kernel() if number_format.weights is torch.bfloat16 else linear_kernel(number_format)


def _float32_kernel() -> LinearKernel:
    return OneDnnLinear(torch.float32) if _has_onednn() else RowByRowLinear()


def _has_onednn() -> bool:
    has: bool = torch._C._has_mkldnn
    return has


def _as(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype)
