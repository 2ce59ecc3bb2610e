"""Sampling settings that a model's authors recommend, used where a request says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from cluster.sampling_params import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from model_files.json_files import read_json_if_present
from model_files.model_source import BUNDLED_MODEL, ModelSource

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Without recommendations: the OpenAI API's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI_DEFAULTS = GenerationDefaults()
# Of so small a model only the most likely answer is reliable. Sampled with its card's temperature 0.2 and
# top_p 0.9, "What is the capital of France?" ran away into repetitions for 5 of 12 seeds.
_BUNDLED_DEFAULTS = GenerationDefaults(temperature=0.0)


class _GenerationConfig(msgspec.Struct):
    """What is read of generation_config.json; null counts as absent."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None


def generation_defaults(source: ModelSource) -> GenerationDefaults:
    """What the files of a model recommend: ``generation_config.json`` of a Hugging Face folder.

    The bundled model is greedy.

    Raises ModelFileError for a value that is not allowed.
    """
    if source.default_name == BUNDLED_MODEL:
        return _BUNDLED_DEFAULTS
    if source.kind != "hf":
        return OPENAI_DEFAULTS
    stored = msgspec.structs.asdict(read_json_if_present(source.path / _FILE, _GenerationConfig))
    return GenerationDefaults(**{name: value for name, value in stored.items() if value is not None})
