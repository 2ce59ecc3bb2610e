"""Multi-head attention with grouped key and value heads."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.build import BuildContext
from engine.layers.linear import build_linear, pack_linears
from engine.layers.norm import RmsNorm
from engine.ops.backend import StepContext


class Attention(Protocol):
    """An attention layer of any kind."""

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Float32 ``[num_tokens, hidden_size]`` to the layer's output of the same shape."""


class GroupedQueryAttention:
    """Queries, keys and values from one merged linear layer; optionally a norm on each query and key head."""

    def __init__(self, context: BuildContext, layer: int) -> None:
        config = context.config
        prefix = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._backend = context.backend
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._scale = config.head_dim**-0.5
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._qkv_proj = pack_linears(
            context,
            [(f"{prefix}.q_proj", query_size), (f"{prefix}.k_proj", kv_size), (f"{prefix}.v_proj", kv_size)],
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self._o_proj = build_linear(
            context, f"{prefix}.o_proj", query_size, config.hidden_size, bias=config.attention_output_bias
        )
        self._q_norm = RmsNorm(context, f"{prefix}.q_norm", config.head_dim) if config.qk_norm else None
        self._k_norm = RmsNorm(context, f"{prefix}.k_norm", config.head_dim) if config.qk_norm else None

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        query_key, value = self._backend.qkv(x, self._qkv_proj, self._num_heads, self._num_kv_heads)
        if self._q_norm is not None and self._k_norm is not None:
            query_key = query_key.float()
            query = self._q_norm(query_key[:, : self._num_heads])
            query_key = torch.cat([query, self._k_norm(query_key[:, self._num_heads :])], dim=1)
        out = self._backend.rotary_write_attend(self._layer, query_key, value, self._scale, context)
        return self._o_proj(out.view(x.shape[0], -1))


def build_attention(context: BuildContext, layer: int) -> Attention:
    """The attention of layer ``layer``: the one place to choose its kind."""
    return GroupedQueryAttention(context, layer)
