"""Which tokens end an answer, from what the files of a model say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_files.end_tokens import end_token_ids
from model_files.gguf import GgufFile
from model_files.json_files import ModelFileError
from tests.model_files.gguf_writer import write_gguf

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"]
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)
NORMAL, CONTROL = 1, 3


def ends_of_gguf(path: Path, **entries: Any) -> tuple[int, ...]:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    file = write_gguf(path / "m.gguf", {**metadata, "tokenizer.chat_template": CHATML_TEMPLATE}, {})
    with GgufFile.open(file) as gguf:
        return end_token_ids(gguf)


def folder_with(path: Path, **files: object) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def tokenizer(*special: str, plain: tuple[str, ...] = ()) -> dict[str, Any]:
    """The parts of a tokenizer.json that are read: added tokens from id 10 on, and a vocabulary."""
    added = [{"content": text, "special": text in special} for text in (*special, *plain)]
    return {
        "added_tokens": [{"id": 10 + index, **token} for index, token in enumerate(added)],
        "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 5}},
    }


def test_the_end_of_a_turn_is_an_end_where_a_gguf_file_names_only_the_end_of_a_text(tmp_path: Path) -> None:
    types = [CONTROL, CONTROL, CONTROL, NORMAL]
    assert ends_of_gguf(tmp_path, tokens=CHATML, token_type=types, eos_token_id=0) == (0, 2)


def test_letters_that_spell_the_end_of_a_turn_are_none(tmp_path: Path) -> None:
    types = [CONTROL, CONTROL, NORMAL, NORMAL]
    assert ends_of_gguf(tmp_path, tokens=CHATML, token_type=types, eos_token_id=0) == (0,)


def test_a_gguf_file_names_three_kinds_of_ends(tmp_path: Path) -> None:
    entries = {"eos_token_id": 3, "eot_token_id": 1, "eom_token_id": 0}
    assert ends_of_gguf(tmp_path, tokens=["x", "y", "z", "w"], **entries) == (0, 1, 3)
    assert ends_of_gguf(tmp_path) == ()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"tokens": CHATML, "eos_token_id": 4}, r"eos_token_id is 4, outside the vocabulary of 4 tokens"),
        ({"eot_token_id": "x"}, r"m\.gguf: tokenizer\.ggml\.eot_token_id is 'x'; a token id"),
        ({"tokens": 3}, r"tokenizer\.ggml\.tokens is 3; a list"),
    ],
)
def test_a_broken_entry_of_a_gguf_file_is_named(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        ends_of_gguf(tmp_path, **entries)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [9, 2, 7]}}, (2, 7, 9)),
        ({"config": {"eos_token_id": [2, 3]}, "generation_config": {"eos_token_id": None}}, (2, 3)),
        (
            {
                "config": {"eos_token_id": 1},
                "tokenizer": tokenizer("<|endoftext|>", "<|im_end|>"),
                "tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}},
            },
            (1, 10, 11),
        ),
        ({"tokenizer": tokenizer("<x>", plain=("<|im_end|>",)), "config": {}}, ()),
        ({"tokenizer": tokenizer(), "special_tokens_map": {"eos_token": "</s>"}}, (5,)),
        ({}, ()),
    ],
)
def test_ends_of_a_folder(files: dict[str, object], ends: tuple[int, ...], tmp_path: Path) -> None:
    assert end_token_ids(folder_with(tmp_path, **files)) == ends


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"eos_token_id": ["x"]}}, r'_config\.json: eos_token_id\[0\] is "x": exp'),
        ({"config": {"eos_token_id": 9, "vocab_size": 9}}, r"config\.json: eos_token_id is 9, outside"),
        ({"config": {"eos_token_id": -1}}, r"eos_token_id is -1, outside the vocabulary"),
        (
            {"tokenizer": tokenizer(), "tokenizer_config": {"eos_token": "<end>"}},
            r"tokenizer_config\.json: eos_token is '<end>', which is not in the vocabulary",
        ),
        (
            {"tokenizer": tokenizer(), "tokenizer_config": {"eos_token": 3}},
            r"config\.json: eos_token is 3: exp",
        ),
        ({"tokenizer": {"added_tokens": 3}}, r"tokenizer\.json: added_tokens is 3: expected `array`"),
        ({"config": []}, r"config\.json: expected `object`, got `array`"),
    ],
)
def test_a_broken_field_of_a_folder_is_named(files: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        end_token_ids(folder_with(tmp_path, **files))
