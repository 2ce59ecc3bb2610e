"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from engine.layers.build import BuildContext


class RmsNorm:
    """RMS norm over the last axis, in float32."""

    def __init__(self, context: BuildContext, name: str, size: int) -> None:
        self._backend = context.backend
        self._weight = context.backend.vector(context.weights.take(f"{name}.weight", (size,)))
        self._eps = context.config.rms_norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 ``[..., size]`` to the same shape."""
        return self._backend.rms_norm(x, self._weight, self._eps)

    def after_adding(self, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Adds ``update`` to ``residual`` in place, and normalises the sum."""
        return self._backend.add_rms_norm(residual, update, self._weight, self._eps)
