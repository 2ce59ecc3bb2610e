"""The bundled model's metadata, and a tokenizer for it built without this project's code."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from model_files.gguf import GgufFile
from model_files.model_source import BUNDLED_MODEL, ModelNotFoundError, resolve_model
from text_pipeline.gguf_tokenizer import tokenizer_from_gguf
from text_pipeline.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def bundled_metadata() -> dict[str, Any]:
    try:
        source = resolve_model(BUNDLED_MODEL)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    with GgufFile.open(source.path) as gguf:
        return dict(gguf.metadata)


@pytest.fixture(scope="session")
def tokenizer(bundled_metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(bundled_metadata)


@pytest.fixture(scope="session")
def reference_tokenizer(bundled_metadata: dict[str, Any]) -> BackendTokenizer:
    """Byte-level BPE with every digit apart, as the model's original tokenizer is published."""
    tokens = bundled_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in bundled_metadata["tokenizer.ggml.merges"]]
    backend = BackendTokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = bundled_metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend
