"""The tokenizer of a Hugging Face folder: what its JSON files say, and what is said about broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer

from text_pipeline.hf_tokenizer import (
    chat_templates_of_folder,
    special_token_texts_of_folder,
    tokenizer_from_folder,
)
from text_pipeline.text_model import load_text_model
from text_pipeline.tokenizer import TokenizerError


@pytest.fixture
def folder(tmp_path: Path, reference_tokenizer: BackendTokenizer) -> Path:
    reference_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_a_folder_s_tokenizer(folder: Path, reference_tokenizer: BackendTokenizer) -> None:
    write(folder, "tokenizer_config.json", {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True})
    tokenizer = tokenizer_from_folder(folder)
    start = tokenizer.token_id("<|im_start|>")
    assert tokenizer.bos_token_id == start
    text = "What is 12 + 30?<|im_end|>\n"
    plain = reference_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == plain
    assert tokenizer.encode(text, add_special_tokens=True) == [start, *plain]


def test_special_tokens_may_be_in_either_file(tmp_path: Path) -> None:
    assert special_token_texts_of_folder(tmp_path) == (None, None)
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert special_token_texts_of_folder(tmp_path) == ("<s>", "</s>")
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert special_token_texts_of_folder(tmp_path) == ("<s>", "<|im_end|>")


@pytest.mark.parametrize(
    ("value", "templates"),
    [
        (None, {}),
        ("a", {"default": "a"}),
        (
            [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}],
            {"default": "a", "rag": "b"},
        ),
        ({"tool_use": "c"}, {"tool_use": "c"}),
    ],
)
def test_spellings_of_chat_templates(tmp_path: Path, value: object, templates: dict[str, str]) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    assert chat_templates_of_folder(tmp_path) == templates


def test_a_later_file_s_chat_template_wins(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "first"})
    write(tmp_path, "chat_template.json", {"chat_template": "second"})
    assert chat_templates_of_folder(tmp_path) == {"default": "second"}
    (tmp_path / "chat_template.jinja").write_text("third")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("fourth")
    assert chat_templates_of_folder(tmp_path) == {"default": "third", "rag": "fourth"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"bos_token": 3}, r"tokenizer_config\.json: .*got `int` - at `\$\.bos_token`"),
        ({"add_bos_token": "yes"}, r"got `str` - at `\$\.add_bos_token`"),
        (
            {"chat_template": [{"name": "a"}]},
            r"missing required field `template` - at `\$\.chat_template\[0\]`",
        ),
        ([], r"tokenizer_config\.json: Expected `object`, got `array`"),
        ({"bos_token": "<nobody>"}, r"bos_token is '<nobody>', which is not in the vocabulary"),
    ],
)
def test_a_broken_field_is_named(folder: Path, content: Any, message: str) -> None:
    write(folder, "tokenizer_config.json", content)
    with pytest.raises(TokenizerError, match=message):
        load_text_model("hf", folder)
