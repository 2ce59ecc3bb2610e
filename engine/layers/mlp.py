"""The feed-forward part of a layer."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.build import BuildContext
from engine.layers.linear import build_linear, build_merged_linear


class Mlp(Protocol):
    """A feed-forward layer of any kind."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 ``[num_tokens, hidden_size]`` to the layer's output of the same shape."""


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``, gate and up as one linear layer."""

    def __init__(self, context: BuildContext, layer: int) -> None:
        config = context.config
        prefix = f"model.layers.{layer}.mlp"
        size = config.intermediate_size
        self._backend = context.backend
        self._gate_up_proj = build_merged_linear(
            context,
            [(f"{prefix}.gate_proj", size), (f"{prefix}.up_proj", size)],
            config.hidden_size,
            bias=config.mlp_bias,
        )
        self._down_proj = build_linear(
            context, f"{prefix}.down_proj", size, config.hidden_size, bias=config.mlp_bias
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down_proj(self._backend.silu_mul(self._gate_up_proj(x)))


def build_mlp(context: BuildContext, layer: int) -> Mlp:
    """The feed-forward part of layer ``layer``: the one place to choose its kind."""
    return GatedMlp(context, layer)
