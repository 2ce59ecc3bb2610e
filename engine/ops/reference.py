"""The operations in their plainest form: what other backends are compared with, in tests and in workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kv_cache_storage import KvCacheStorage
from engine.ops.backend import Backend, EmbeddingTable, PackedLinear, PagedAttention, SequenceSpan
from engine.ops.number_formats import FLOAT16_MAX, check_float16_range
from engine.weights.dequantize import dequantize
from engine.weights.stored_tensor import StoredTensor


class ReferencePagedAttention:
    """Token by token, slot by slot, in float64."""

    def __init__(self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage) -> None:
        self._spans = spans
        self._kv_cache = kv_cache

    def _slot(self, span: SequenceSpan, position: int) -> tuple[int, int]:
        block_size = self._kv_cache.layout.block_size
        return span.block_ids[position // block_size], position % block_size

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache = self._kv_cache.layer(layer)  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        if cache.dtype is torch.float16:  # a value beyond its range would become infinite
            key, value = key.clamp(-FLOAT16_MAX, FLOAT16_MAX), value.clamp(-FLOAT16_MAX, FLOAT16_MAX)
        for span in self._spans:
            for index in range(span.query_len):
                block, offset = self._slot(span, span.context_len + index)
                cache[block, 0, :, offset] = key[span.query_start + index].to(cache.dtype)
                cache[block, 1, :, offset] = value[span.query_start + index].to(cache.dtype)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        cache = self._kv_cache.layer(layer)
        num_queries_per_kv = query.shape[1] // self._kv_cache.layout.num_kv_heads
        out = torch.empty_like(query)
        for span in self._spans:
            slots = [self._slot(span, position) for position in range(span.seq_len)]
            keys_values = torch.stack([cache[block, :, :, offset] for block, offset in slots], dim=2)
            keys, values = keys_values.double()  # each [num_kv_heads, seq_len, head_dim]
            for index in range(span.query_len):
                row = span.query_start + index
                visible = span.context_len + index + 1
                for head in range(query.shape[1]):
                    kv_head = head // num_queries_per_kv
                    scores = keys[kv_head, :visible] @ query[row, head].double() * scale
                    out[row, head] = scores.softmax(dim=0) @ values[kv_head, :visible]
        return out


class ReferenceBackend(Backend):
    """Every operation written out from its definition, in any number format, and slow."""

    @classmethod
    def has_float16(cls) -> bool:
        return True

    @property
    def kernels(self) -> str:
        return "PyTorch reference"

    def vector(self, stored: StoredTensor) -> torch.Tensor:
        return dequantize([stored], torch.float32).to(self.device)

    def prepack_linear(
        self, weights: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()
    ) -> PackedLinear:
        weight = dequantize(weights, self.number_format.loaded)
        if self.number_format.weights is torch.float16:
            check_float16_range(weight)
        weight = weight.to(self.device, self.number_format.weights)
        bias = dequantize(biases, torch.float32).to(self.device) if biases else None
        return PackedLinear(weight, bias, in_features=weight.shape[1], out_features=weight.shape[0])

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        dtype = self.number_format.activations
        return _product(x.to(dtype), packed).to(dtype)

    def prepack_head(self, weight: StoredTensor) -> PackedLinear:
        return self.prepack_linear([weight])

    def embedding_table(self, table: StoredTensor) -> EmbeddingTable:
        return dequantize([table], self.number_format.weights).to(self.device)

    def embedding(self, token_ids: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        assert isinstance(table, torch.Tensor)
        return table[token_ids].float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first, second], dim=-1) * cos + torch.cat([second, first], dim=-1) * sin

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return gate / (1 + torch.exp(-gate)) * up

    def logits(self, hidden: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return _product(hidden, packed)

    def plan_attention(self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage) -> PagedAttention:
        return ReferencePagedAttention(spans, kv_cache)


def _product(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    assert isinstance(packed.weight, torch.Tensor)
    out = x.float() @ packed.weight.float().T
    return out if packed.bias is None else out + packed.bias.float()
