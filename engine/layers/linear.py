"""Linear layers, alone or several in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.build import BuildContext
from engine.ops.backend import Backend, PackedLinear
from engine.ops.number_formats import WeightRangeError


class Linear:
    """A linear layer whose weight the backend has laid out for itself."""

    def __init__(self, backend: Backend, packed: PackedLinear) -> None:
        self._backend = backend
        self._packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features]`` to ``[num_tokens, out_features]`` in the activations' dtype."""
        return self._backend.linear(x, self._packed)


def build_linear(context: BuildContext, name: str, in_features: int, out_features: int, bias: bool) -> Linear:
    """The linear layer stored as ``name.weight`` (and ``name.bias``)."""
    return build_merged_linear(context, [(name, out_features)], in_features, bias)


def build_merged_linear(
    context: BuildContext, parts: Sequence[tuple[str, int]], in_features: int, bias: bool
) -> Linear:
    """Linear layers with one input as one: their outputs follow each other on the last axis.

    ``parts`` gives each layer's name and number of output features. Raises WeightError for a missing or
    misshapen tensor, WeightRangeError for a weight that the number format cannot hold.
    """
    take, backend, dtype = context.weights.take, context.backend, context.backend.number_format.loaded
    weights = [take(f"{name}.weight", (size, in_features), dtype) for name, size in parts]
    biases = [take(f"{name}.bias", (size,), torch.float32) for name, size in parts] if bias else []
    try:
        packed = backend.prepack_linear(_joined(weights), _joined(biases) if bias else None)
    except WeightRangeError as error:
        names = ", ".join(f"{name}.weight" for name, _ in parts)
        raise WeightRangeError(f"{names}: {error}") from None
    return Linear(backend, packed)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
