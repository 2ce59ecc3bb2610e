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
    """Linear layers with one input as one, see ``pack_linears``."""
    return Linear(context.backend, pack_linears(context, parts, in_features, bias))


def pack_linears(
    context: BuildContext, parts: Sequence[tuple[str, int]], in_features: int, bias: bool
) -> PackedLinear:
    """Linear layers with one input, laid out as one: their outputs follow each other on the last axis.

    ``parts`` gives each layer's name and number of output features. Raises WeightError for a missing or
    misshapen tensor, WeightRangeError for a weight that the number format cannot hold.
    """
    take = context.weights.take
    weights = [take(f"{name}.weight", (size, in_features)) for name, size in parts]
    biases = [take(f"{name}.bias", (size,)) for name, size in parts] if bias else []
    try:
        return context.backend.prepack_linear(weights, biases)
    except WeightRangeError as error:
        names = ", ".join(f"{name}.weight" for name, _ in parts)
        raise WeightRangeError(f"{names}: {error}") from None
