"""The CPU backend: oneDNN linear layers with weights packed once, float32 between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.kv_cache_storage import KvCacheStorage
from engine.ops.backend import PackedLinear, PagedAttention, SequenceSpan
from engine.ops.cpu_attention import CausalMask, CpuPagedAttention

# The number of rows oneDNN picks a weight layout for. Any number of rows may be multiplied with the result.
_PACK_ROWS = 16


class CpuBackend:
    """Operations on the CPU.

    A row's result is bitwise the same whichever rows share the step, where oneDNN packs weights: its kernels
    add up each output element in one order for every number of rows, with one exception handled in
    :meth:`linear`. Without oneDNN (or without its bfloat16 support) plain PyTorch does the same work slower
    and without that property.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype other than float32 and bfloat16."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} is not supported on CPUs; supported are float32 and bfloat16")
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._causal_mask = CausalMask()
        self._uses_packed_weights: bool = torch._C._has_mkldnn and (
            dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def prepack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        out_features, in_features = weight.shape
        if self._uses_packed_weights:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        return PackedLinear(weight, bias, in_features=in_features, out_features=out_features)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        x = x.to(self.dtype)
        if not self._uses_packed_weights:
            return F.linear(x, packed.weight, packed.bias)
        num_rows = x.shape[0]
        if num_rows == 1 and self.dtype is torch.float32:
            # A single float32 row takes a vector kernel that adds up long rows in another order.
            x = x.expand(2, -1).contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
        return out[:num_rows]

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table).float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.float()
        # A multiply and an add, not addcmul: whether that is fused may differ between a vectorised loop and
        # its remainder, and with it the result between batches.
        return torch.roll(x, x.shape[-1] // 2, dims=-1).mul_(sin).add_(x * cos)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.to(torch.float32, copy=True)
        return F.silu(gate, inplace=True).mul_(up.float())

    def logits(self, hidden: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self.linear(hidden, packed).float()

    def plan_attention(self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage) -> PagedAttention:
        return CpuPagedAttention(spans, kv_cache, self._causal_mask)
