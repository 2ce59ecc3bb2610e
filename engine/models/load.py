"""Loads a model from disk."""

from __future__ import annotations

from contextlib import closing

import torch

from engine.layers.build import BuildContext
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.gguf_config import gguf_model_config
from engine.models.hf_config import hf_model_config
from engine.ops.backend import Backend
from engine.weights.gguf_weights import GgufWeights
from engine.weights.safetensors_weights import SafetensorsWeights
from engine.weights.source import WeightReader, WeightSource
from model_files.gguf import GgufFile
from model_files.model_source import ModelSource


def load_model_config(source: ModelSource) -> ModelConfig:
    """The configuration alone, without weights. Raises ModelConfigError, GgufFormatError, OSError."""
    if source.kind == "gguf":
        with GgufFile.open(source.path) as file:
            return gguf_model_config(file)
    return hf_model_config(source.path)


def load_model(source: ModelSource, *, backend: Backend, max_model_len: int | None = None) -> Decoder:
    """Reads configuration and weights and builds the model in the backend's number format.

    ``max_model_len`` is the longest context to serve, in tokens; None asks for all the model allows. Raises
    ModelConfigError where the model or the length is not supported, WeightError where the weights do not fit
    the configuration, WeightRangeError where the format cannot hold them, GgufFormatError,
    ModelNotFoundError, OSError.
    """
    weights: WeightSource
    if source.kind == "gguf":
        file = GgufFile.open(source.path)
        with closing(file):
            config = gguf_model_config(file)
            return _build(config, GgufWeights(file, config), backend, max_model_len)
    config = hf_model_config(source.path)
    config.resolve_max_model_len(max_model_len)  # before any weight is touched
    with closing(SafetensorsWeights(source.path)) as weights:
        return _build(config, weights, backend, max_model_len)


@torch.inference_mode()
def _build(
    config: ModelConfig, weights: WeightSource, backend: Backend, max_model_len: int | None
) -> Decoder:
    length = config.resolve_max_model_len(max_model_len)
    reader = WeightReader(weights)
    model = Decoder(BuildContext(config, reader, backend, length))
    reader.finish()
    return model
