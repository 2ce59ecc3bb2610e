"""Loads the text side of models from their files, without their weights."""

from __future__ import annotations

from collections.abc import Mapping

from model_files.gguf import GgufFile
from model_files.model_source import ModelSource
from text_pipeline.text_model import TextModel, load_text_model


def load_text_model_of(source: ModelSource) -> TextModel:
    """Tokenizer and chat template of a model on disk.

    Raises TokenizerError, ChatTemplateError, GgufFormatError.
    """
    if source.kind == "hf":
        return load_text_model("hf", source.path)
    with GgufFile.open(source.path) as gguf:
        return load_text_model("gguf", source.path, gguf.metadata)


def load_text_models(sources: Mapping[str, ModelSource]) -> dict[str, TextModel]:
    """Those of several models by name. Raises as ``load_text_model_of`` does."""
    return {name: load_text_model_of(source) for name, source in sources.items()}
