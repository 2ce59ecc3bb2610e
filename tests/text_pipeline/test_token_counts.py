"""The least number of tokens of a text is never more than what encoding it gives."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from text_pipeline.gguf_tokenizer import tokenizer_from_gguf
from text_pipeline.token_counts import _NFC_SHRINKS_BY, MinTokenCount
from text_pipeline.tokenizer import BYTE_LEVEL, BYTE_OF_CHARACTER, PieceFormat, Tokenizer

TEXT = st.text(
    st.characters(exclude_categories=["Cs"])
    | st.sampled_from([" ", "a", "▁", "\x04", "\u1100", "\u1161", "e"])
)


def byte_level(*added: AddedToken, normalizer: Any = None, without: bytes = b"") -> Tokenizer:
    characters = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    pieces = [bytes([byte]) for byte in range(256) if byte not in without]
    vocabulary = {"".join(characters[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    a, b, c = (characters[byte] for byte in b"abc")
    vocabulary |= {a + b: len(vocabulary), a + b + c: len(vocabulary) + 1}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[(a, b), (a + b, c)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(list(added))
    return Tokenizer(backend, BYTE_LEVEL, bos_token_id=None)


def sentencepiece(*, byte_fallback: bool = True, normalizer: Any = None) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = BackendTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    backend.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return Tokenizer(
        backend,
        PieceFormat("sentencepiece", byte_fallback=byte_fallback, strips_leading_space=True),
        bos_token_id=None,
    )


STRIPPING = AddedToken("<end>", special=True, normalized=False, lstrip=True, rstrip=True)
TOKENIZERS = {
    "plain": byte_level(),
    "lacks bytes": byte_level(without=b"\x04x\xe4"),
    "normalizes": byte_level(normalizer=normalizers.NFC()),
    "normalizes and lacks bytes": byte_level(normalizer=normalizers.NFC(), without=b"\xc3"),
    "strips": byte_level(STRIPPING),
    "sentencepiece": sentencepiece(),
    "unknown": sentencepiece(byte_fallback=False),
    "lower": byte_level(normalizer=normalizers.Lowercase()),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@settings(max_examples=200, deadline=None)
@given(text=TEXT, times=st.integers(1, 50))
def test_never_more_than_there_are(tokenizer: Tokenizer, text: str, times: int) -> None:
    text *= times
    assert MinTokenCount(tokenizer).of(text) <= len(tokenizer.encode(text))


@pytest.fixture(scope="module")
def bundled(tokenizer: Tokenizer) -> MinTokenCount:
    return MinTokenCount(tokenizer)


@settings(max_examples=200, deadline=None)
@given(text=TEXT, times=st.integers(1, 50))
def test_never_more_than_there_are_in_the_bundled_model(
    tokenizer: Tokenizer, bundled: MinTokenCount, text: str, times: int
) -> None:
    text *= times
    assert bundled.of(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("name", "text", "least"),
    [
        ("plain", "x" * 30, 10),  # "abc" is the longest token
        ("plain", "x" * 31, 11),
        ("plain", "", 0),
        ("lacks bytes", "x" * 30, 0),
        ("lacks bytes", "y" * 30, 10),
        ("normalizes", "x" * 30, 3),
        ("normalizes and lacks bytes", "x" * 30, 0),  # a byte it has may become one it lacks
        ("strips", "x" * 30 + " " * 100, 6),  # "<end>" is the longest
        ("sentencepiece", "x" * 360, 24),  # "<unk>" is the longest, and U+2581 has 3 bytes
        ("unknown", "x" * 360, 0),
        ("lower", "x" * 360, 0),
    ],
)
def test_known_counts(name: str, text: str, least: int) -> None:
    tokenizer = TOKENIZERS[name]
    assert MinTokenCount(tokenizer).of(text) == least


def test_the_longest_token_of_the_bundled_model(bundled: MinTokenCount) -> None:
    assert bundled.of("a" * 7_000_000) == -(-7_000_000 // 81)


def test_a_step_that_may_remove_text_gives_no_bound() -> None:
    backend = BackendTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("b"), "removed")
    removing = Tokenizer(backend, BYTE_LEVEL, bos_token_id=None)
    assert MinTokenCount(removing).of("ab" * 100) == 0


def test_nfc_never_shrinks_by_more_than_is_allowed_for() -> None:
    """Of all characters: each, and what it is composed of, in the longest of the spellings that mean it."""
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    spelled: dict[str, int] = {}  # the most bytes of a character that means the same as this sequence
    for character in characters:
        meant = unicodedata.normalize("NFD", character)
        spelled[meant] = max(spelled.get(meant, 0), len(character.encode()))
    worst = 0.0
    for meant, longest in spelled.items():
        size = max(longest, sum(spelled.get(part, len(part.encode())) for part in meant))
        worst = max(worst, size / len(unicodedata.normalize("NFC", meant).encode()))
    assert 3 < worst < _NFC_SHRINKS_BY


def test_gguf_families_have_a_bound(bundled_metadata: dict[str, Any]) -> None:
    for pre in ("smollm", "gpt-2", "llama-bpe", "tekken", "default"):
        tokenizer = tokenizer_from_gguf({**bundled_metadata, "tokenizer.ggml.pre": pre})
        assert MinTokenCount(tokenizer).of("a" * 10_000) > 0, pre
