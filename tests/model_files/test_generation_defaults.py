"""Which sampling settings a model brings along."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_files.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults, generation_defaults
from model_files.model_source import ModelSource, resolve_model


def folder_with(folder: Path, text: str) -> ModelSource:
    (folder / "generation_config.json").write_text(text)
    return ModelSource("hf", folder, "m")


def test_a_folder_with_recommendations(tmp_path: Path) -> None:
    source = folder_with(tmp_path, '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2}')
    assert generation_defaults(source) == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)


def test_without_recommendations_the_openai_defaults_hold(tmp_path: Path) -> None:
    assert generation_defaults(ModelSource("hf", tmp_path, "m")) == OPENAI_DEFAULTS
    assert generation_defaults(folder_with(tmp_path, '{"temperature": null}')) == OPENAI_DEFAULTS
    assert generation_defaults(ModelSource("gguf", tmp_path / "m.gguf", "m")) == OPENAI_DEFAULTS


def test_the_bundled_model_is_greedy() -> None:
    defaults = generation_defaults(resolve_model("smollm2-135m-instruct"))
    assert defaults == GenerationDefaults(temperature=0.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"temperature": "hot"}', 'temperature is "hot"'),
        ('{"top_p": -0.1}', "top_p is -0.1"),
        ('{"repetition_penalty": 0.001}', "repetition_penalty is 0.001: expected `float` >= 0.01"),
        ('{"top_k": true}', "top_k is true"),
        ("[]", "expected `object`, got `array`"),
        ("{", "not valid JSON"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json") as error:
        generation_defaults(folder_with(tmp_path, text))
    assert named in str(error.value)
