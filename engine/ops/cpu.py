"""The CPU backend: linear layers with weights expanded and packed once, float32 between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.kv_cache_storage import KvCacheStorage
from engine.ops.backend import Backend, EmbeddingTable, PackedLinear, PagedAttention, SequenceSpan
from engine.ops.cpu_attention import CausalMask, CpuPagedAttention
from engine.ops.cpu_linear import head_kernel, linear_kernel
from engine.ops.number_formats import NumberFormat, has_float16_linear
from engine.weights.dequantize import dequantize
from engine.weights.quantized_rows import QuantizedRows
from engine.weights.stored_tensor import StoredTensor


class CpuBackend(Backend):
    """Operations on the CPU, see ``Backend``."""

    def __init__(self, number_format: NumberFormat) -> None:
        super().__init__(number_format)
        self._causal_mask = CausalMask()
        self._linear = linear_kernel(number_format)
        self._head = head_kernel(number_format)

    @classmethod
    def suits_this_machine(cls) -> bool:
        return True

    @classmethod
    def has_float16(cls) -> bool:
        return has_float16_linear()

    @property
    def kernels(self) -> str:
        return f"{self._linear.name}, {torch.backends.cpu.get_cpu_capability()}"

    def vector(self, stored: StoredTensor) -> torch.Tensor:
        return dequantize([stored], torch.float32)

    def prepack_linear(
        self, weights: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()
    ) -> PackedLinear:
        bias = dequantize(biases, torch.float32) if biases else None
        return self._linear.pack(dequantize(weights, self.number_format.loaded), bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear.multiply(x, packed)

    def prepack_head(self, weight: StoredTensor) -> PackedLinear:
        return self._head.pack(dequantize([weight], self.number_format.loaded), None)

    def embedding_table(self, table: StoredTensor) -> EmbeddingTable:
        dtype = self.number_format.weights
        return QuantizedRows(table, dtype) if table.is_quantised else dequantize([table], dtype)

    def embedding(self, token_ids: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        if isinstance(table, QuantizedRows):
            return table.rows(token_ids)
        return F.embedding(token_ids, table).float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.float()
        # A multiply and an add, not addcmul: whether that is fused may differ between a vectorised loop and
        # its remainder, and with it the result between batches.
        return torch.roll(x, x.shape[-1] // 2, dims=-1).mul_(sin).add_(x * cos)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        # Written out: F.silu takes another path in the remainder of its vector loop, which moves with the
        # number of rows and threads wherever the width is no multiple of 32.
        divisor = torch.neg(gate).exp_().add_(1)
        return torch.div(gate, divisor, out=divisor).mul_(up)

    def logits(self, hidden: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._head.multiply(hidden, packed)

    def plan_attention(self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage) -> PagedAttention:
        return CpuPagedAttention(spans, kv_cache, self._causal_mask)
