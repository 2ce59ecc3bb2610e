"""The tokenizer of a GGUF file: the bundled model against an independent build, and small files for the
edges.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from text_pipeline.gguf_tokenizer import tokenizer_from_gguf
from text_pipeline.tokenizer import BYTE_OF_CHARACTER, Tokenizer, TokenizerError

TEXTS = {
    "empty": "",
    "ascii": "The quick brown fox jumps over the lazy dog.",
    "contractions": "I'm sure they'll say we've won, DON'T you?",
    "digits": "In 2024 there were 1234567 ½ ² Ⅷ ٣ ones.",
    "cjk": "日本語のテキストと中文文本，한국어도.",
    "emoji": "family 👨‍👩‍👧‍👦 flag 🇩🇪 skin 👍🏽 heart ❤️",
    "whitespace": "a  b   c\t\td\n\n\n  e \r\n f    ",
    "only spaces": "      ",
    "unicode spaces": "a b c　d\u2028e\x85f",
    "code": "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # ok\n\n\nclass A:\n    pass\n",
    "combining": "é e\u0301 ñ n\u0303 Å \u212b",
    "control": "\x00\x01\x7f\ufeff\ufffd",
    "special in text": "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "rtl": "שלום עולם مرحبا بالعالم",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_equals_independent_tokenizer(
    tokenizer: Tokenizer, reference_tokenizer: BackendTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == reference_tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_equals_independent_tokenizer_and_round_trips(
    tokenizer: Tokenizer, reference_tokenizer: BackendTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference_tokenizer.encode(text, add_special_tokens=False).ids
    # This vocabulary lacks bytes that its training text never had, such as those of unassigned characters.
    in_vocabulary = known_bytes(tokenizer)
    if set(text.encode()) <= in_vocabulary:
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@functools.cache
def known_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    """Bytes that the vocabulary has a token for."""
    tokens = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    return frozenset(token[0] for token in tokens if len(token) == 1)


def test_known_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.encode("2024") == [34, 32, 34, 36]


def test_facts_of_the_bundled_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, False)
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(17)
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a")


def test_every_token_has_bytes(tokenizer: Tokenizer, bundled_metadata: dict[str, Any]) -> None:
    for token_id, piece in enumerate(bundled_metadata["tokenizer.ggml.tokens"]):
        expected = piece.encode() if token_id < 17 else bytes(BYTE_OF_CHARACTER[c] for c in piece)
        assert tokenizer.token_bytes(token_id) == expected


def test_impossible_ids(tokenizer: Tokenizer) -> None:
    for token_id in (-1, 49152, 2**40):
        assert not tokenizer.has_token(token_id)
        with pytest.raises(TokenizerError, match="49152"):
            tokenizer.token_bytes(token_id)
    assert tokenizer.decode([-1, 504, 49152]) == tokenizer.decode([504])


def test_special_tokens_only_where_parsed(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert 2 in tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.special_token_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert 2 in tokenizer.encode(text), "the other mode is not changed by it"
    assert tokenizer.decode(tokenizer.encode(text)) == "ab"


def test_lone_surrogate_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"character 2 is the lone surrogate U\+D83D"):
        tokenizer.encode("ab\ud83d")


def test_token_bytes_of_a_partial_character_and_of_a_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.encode("🚀")[0]) == b"\xf0\x9f"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


CHARACTERS = [character for character, _ in sorted(BYTE_OF_CHARACTER.items(), key=lambda item: item[1])]
MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "1 2",
    "12 3",
    "Ġ hello",
    "e Ì",
    "eÌ ģ",
    "Ã ©",
    "A B",
    "' S",
    "' s",
]
TOKENS = [
    *CHARACTERS,
    *(merge.replace(" ", "") for merge in MERGES),
    "whole",
    "<s>",
    "</s>",
    "<|eot_id|>",
    "<think>",
]


def small(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    types = [1] * len(TOKENS)
    types[-4:-1] = [3, 3, 3]
    types[-1] = 4
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": TOKENS.index("<s>"),
        "tokenizer.ggml.eos_token_id": TOKENS.index("</s>"),
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["123", "4"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "4123", ["4", "12", "3"]),  # groups of three: 412|3, in which only "12" merges
        ("llama3", "123123", ["123", "123"]),
        ("gpt-2", "x hello", ["x", " hello"]),
        ("qwen2", "é", ["é"]),
        ("qwen2", "e\u0301", ["é"]),  # NFC first
        ("gpt-2", "e\u0301", ["e", "\ufffd", "\ufffd"]),  # no normalisation, and a mark is no letter
        ("gpt-2", "AB", ["AB"]),
        ("gpt-2", "x'S", ["x", "'", "S"]),  # its contractions are lower case only
        ("llama-bpe", "x'S", ["x", "'S"]),
        ("llama-bpe", "whole", ["whole"]),  # a vocabulary entry that no merge makes
        ("tekken", "whole", ["whole"]),
        ("gpt-2", "whole", ["w", "h", "o", "l", "e"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(tokenizer_from_gguf(small(pre)), text) == expected


def test_missing_pre_is_default() -> None:
    tokenizer = tokenizer_from_gguf(small(None))
    assert pieces(tokenizer, "1234") == ["123", "4"]
    assert tokenizer.decode(tokenizer.encode("a+b  c\n\n x$")) == "a+b  c\n\n x$"


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "default"])
@pytest.mark.parametrize("text", [text for name, text in TEXTS.items() if name != "combining"])
def test_every_pre_tokenizer_keeps_all_text(pre: str, text: str) -> None:
    tokenizer = tokenizer_from_gguf(small(pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_eos_and_user_defined_tokens() -> None:
    tokenizer = tokenizer_from_gguf(small("llama-bpe", add_eos_token=True))
    bos, eos, think = (TOKENS.index(text) for text in ("<s>", "</s>", "<think>"))
    assert tokenizer.add_bos
    assert tokenizer.encode("hello", add_special_tokens=True) == [bos, TOKENS.index("hello"), eos]
    assert tokenizer.encode("hello") == [TOKENS.index("hello")]
    assert tokenizer.encode("<think>") == [think]
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think, bos]) == "<think>"
    assert not tokenizer_from_gguf(small("llama-bpe", add_bos_token=False)).add_bos
    assert tokenizer_from_gguf(small("gpt-2", add_bos_token=True)).add_bos
    assert tokenizer_from_gguf(small("gpt-2", bos_token_id=None, add_bos_token=True)).prefix_token_ids == ()


def test_empty_entry_gets_a_name() -> None:
    tokenizer = tokenizer_from_gguf(small(tokens=[*TOKENS[:-1], ""]))
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.has_token(len(TOKENS) - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"pre": "mystery"}, "'mystery'; supported are default, gpt-2, llama-bpe"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "list of strings"),
        ({"tokens": []}, "not empty"),
        ({"tokens": [*TOKENS[:-1], "whole"]}, "'whole' more than once"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["a b c"]}, "'a b c'"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"merges": ["zz yy"]}, "do not fit"),
        ({"token_type": [1]}, "1 entries for"),
        ({"eos_token_id": 10_000}, "eos_token_id is 10000"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'; expected int"),
        ({"add_bos_token": 1}, "add_bos_token is '1'; expected bool"),
    ],
)
def test_broken_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    metadata = small()
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf({key: value for key, value in metadata.items() if value is not None})
