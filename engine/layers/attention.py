"""Multi-head attention with grouped key and value heads."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.build import BuildContext
from engine.layers.linear import build_linear, build_merged_linear
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
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._qkv_proj = build_merged_linear(
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
        heads = self._qkv_proj(x).view(-1, self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._q_norm is not None and self._k_norm is not None:
            query_key = query_key.float()
            query_key = torch.cat(
                [
                    self._q_norm(query_key[:, : self._num_heads]),
                    self._k_norm(query_key[:, self._num_heads :]),
                ],
                dim=1,
            )
        query_key = self._backend.rotary(
            query_key, context.cos, context.sin
        )  # [num_tokens, num_rotated, head_dim]
        context.attention.write_kv(self._layer, query_key[:, self._num_heads :], value)
        out = context.attention.attend(self._layer, query_key[:, : self._num_heads], self._scale)
        return self._o_proj(out.view(x.shape[0], -1))


def build_attention(context: BuildContext, layer: int) -> Attention:
    """The attention of layer ``layer``: the one place to choose its kind."""
    return GroupedQueryAttention(context, layer)
