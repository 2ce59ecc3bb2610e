"""Sampling settings that a model's authors recommend, used where a request says nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from cluster.sampling_params import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
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
_RANGES = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}


def generation_defaults(source: ModelSource) -> GenerationDefaults:
    """What the files of a model recommend: ``generation_config.json`` of a Hugging Face folder.

    The bundled model is greedy.

    Raises ValueError, with the file and the key, for a value that is not allowed.
    """
    if source.default_name == BUNDLED_MODEL:
        return _BUNDLED_DEFAULTS
    path = source.path / _FILE
    if source.kind != "hf" or not path.is_file():
        return OPENAI_DEFAULTS
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds no JSON object")
    values = {}
    for field in fields(GenerationDefaults):
        value = stored.get(field.name)
        if value is None:
            continue
        low, high = _RANGES[field.name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{path}: {field.name} is {value!r}, must be a number from {low:g} to {high:g}")
        values[field.name] = type(getattr(OPENAI_DEFAULTS, field.name))(value)
    return GenerationDefaults(**values)
