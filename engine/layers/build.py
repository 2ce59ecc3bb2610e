"""What a layer needs to build itself."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig
from engine.ops.backend import Backend
from engine.weights.source import WeightReader


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Given to every layer's constructor: the model's shape, its weights, and the device's operations."""

    config: ModelConfig
    weights: WeightReader
    backend: Backend
    max_model_len: int  # tokens
