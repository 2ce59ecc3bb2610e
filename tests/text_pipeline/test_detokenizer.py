"""Streaming detokenization is byte-exact for any tokens in any chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from text_pipeline.detokenizer import IncrementalDetokenizer
from text_pipeline.tokenizer import BYTE_LEVEL, BYTE_OF_CHARACTER, PieceFormat, Tokenizer

CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
MULTI = [b"ab", b" the", b"\xe4\xb8", b"\xb8\xad", b"\xf0\x9f\x98", b"\x80x", b"\xff\xe4", "é".encode()]
SPECIAL = 256 + len(MULTI)


def byte_level() -> Tokenizer:
    """Ids 0 to 255 are the bytes, then some longer tokens, then one special token."""
    tokens = [
        "".join(CHARACTERS[byte] for byte in raw) for raw in [*(bytes([b]) for b in range(256)), *MULTI]
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = BackendTokenizer(models.BPE(vocab={**vocabulary, "<end>": SPECIAL}, merges=[]))
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, BYTE_LEVEL, bos_token_id=None)


SENTENCEPIECE_TOKENS = [
    "<unk>",
    "<s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "▁a",
    "a",
    "▁▁",
    "中",
    "<0xZZ>",
]


def sentencepiece() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(SENTENCEPIECE_TOKENS)}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>")])
    piece_format = PieceFormat("sentencepiece", byte_fallback=True, strips_leading_space=True)
    return Tokenizer(backend, piece_format, bos_token_id=1)


BYTES, PIECES = byte_level(), sentencepiece()


def stream(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(-1, SPECIAL + 2) | st.integers(0x80, SPECIAL), max_size=30),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    skip=st.booleans(),
)
def test_any_chunking_is_the_bytes_decoded_at_once(ids: list[int], cuts: list[int], skip: bool) -> None:
    def raw(token_id: int) -> bytes:
        if token_id == SPECIAL:
            return b"" if skip else b"<end>"
        if not 0 <= token_id < SPECIAL:
            return b""
        return bytes([token_id]) if token_id < 256 else MULTI[token_id - 256]

    whole = b"".join(map(raw, ids))
    texts = stream(IncrementalDetokenizer(BYTES, skip_special_tokens=skip), cut(ids, cuts))
    assert "".join(texts) == whole.decode(errors="replace")
    assert "".join(texts) == BYTES.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0x80, SPECIAL), max_size=30))
def test_only_an_unfinished_character_is_held_back(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    emitted = ""
    for count, token_id in enumerate(ids, start=1):
        emitted += detokenizer.push([token_id])
        now = BYTES.decode(ids[:count])
        held = now.removeprefix(emitted)
        assert now == emitted + held
        # An unfinished character decodes to one replacement character, an encoded surrogate to one per byte.
        assert held in ("", "\ufffd", "\ufffd\ufffd")


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(SENTENCEPIECE_TOKENS)) | st.integers(250, 264), max_size=20),
    cuts=st.lists(st.integers(0, 100), max_size=6),
)
def test_sentencepiece_any_chunking(ids: list[int], cuts: list[int]) -> None:
    texts = stream(IncrementalDetokenizer(PIECES), cut(ids, cuts))
    assert "".join(texts) == PIECES.decode(ids)


def piece(*texts: str) -> list[int]:
    return [SENTENCEPIECE_TOKENS.index(text) for text in texts]


def test_sentencepiece_decode_equals_library() -> None:
    backend = PIECES._backend
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for ids in (
        piece("▁a", "a", "▁a"),
        piece("<s>", "▁▁", "a"),
        piece("<0xE4>", "<0xB8>", "<0xAD>", "▁", "中"),
        piece("▁", "▁a"),
        piece("a", "<0x0A>", "<0xZZ>"),
    ):
        assert PIECES.decode(ids) == backend.decode(ids)


def test_sentencepiece_leading_space_only_at_the_start_of_the_text() -> None:
    assert IncrementalDetokenizer(PIECES).push(piece("▁a", "▁a")) == "a a"
    after_text = IncrementalDetokenizer(PIECES, prompt_token_ids=piece("<s>", "▁a"))
    assert after_text.push(piece("▁a", "▁a")) == " a a"
    after_bos = IncrementalDetokenizer(PIECES, prompt_token_ids=piece("<s>"))
    assert after_bos.push(piece("▁a")) == "a"


def test_unfinished_character_of_the_prompt() -> None:
    zhong = "中".encode()
    prompt = [*b"ab", *zhong[:2]]
    assert stream(IncrementalDetokenizer(BYTES, prompt_token_ids=prompt), [[zhong[2]], [0x61]]) == [
        "中",
        "a",
        "",
    ]
    # What does not finish it is shown on its own: nothing of the prompt comes out.
    assert stream(IncrementalDetokenizer(BYTES, prompt_token_ids=prompt), [[0x61]]) == ["a", ""]
    assert stream(IncrementalDetokenizer(BYTES, prompt_token_ids=prompt), [[]]) == ["", ""]
    one = IncrementalDetokenizer(BYTES, prompt_token_ids=[zhong[0]])
    assert stream(one, [[zhong[1]], [zhong[2]]]) == ["", "中", ""]


def test_invalid_bytes_do_not_stop_the_stream() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([0xE4]) == ""
    assert detokenizer.push([0x61]) == "\ufffda"


def test_real_text_token_by_token(tokenizer: Tokenizer) -> None:
    text = "naïve 中文 👨‍👩‍👧‍👦 ok\n\n  x"
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=tokenizer.encode("<|im_start|>user\n"))
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(parts) == text
    assert "\ufffd" not in text
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("bad", [[-1], [10**9], [SPECIAL + 1]])
def test_impossible_ids_are_skipped(bad: Any) -> None:
    assert stream(IncrementalDetokenizer(BYTES), [bad, [0x61], bad]) == ["", "a", "", ""]


def starts(detokenizer: IncrementalDetokenizer, ids: list[int]) -> tuple[list[int], str]:
    """Where each token begins, and the text."""
    places, text = [], ""
    for token_id in ids:
        places.append(detokenizer.start_of(token_id))
        text += detokenizer.push([token_id])
    return places, text + detokenizer.finish()


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=20))
def test_a_token_starts_at_the_character_that_its_first_byte_belongs_to(text: str) -> None:
    text = text.encode(errors="ignore").decode()  # no lone surrogates
    raw = text.encode()
    character_of = [index for index, character in enumerate(text) for _ in character.encode()]
    assert starts(IncrementalDetokenizer(BYTES), list(raw)) == (character_of, text)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(-1, SPECIAL + 2) | st.integers(0x80, SPECIAL), max_size=30))
def test_where_a_token_starts_does_not_depend_on_how_its_bytes_were_cut(ids: list[int]) -> None:
    def raw(token_id: int) -> bytes:
        if not 0 <= token_id < SPECIAL:
            return b""
        return bytes([token_id]) if token_id < 256 else MULTI[token_id - 256]

    single = b"".join(map(raw, ids))
    of_bytes, text = starts(IncrementalDetokenizer(BYTES), list(single))
    of_tokens, same_text = starts(IncrementalDetokenizer(BYTES), ids)
    assert same_text == text
    position = 0
    for token_id, place in zip(ids, of_tokens, strict=True):
        if raw(token_id):
            assert place == of_bytes[position]
        position += len(raw(token_id))
    assert of_tokens == sorted(of_tokens)
    assert all(0 <= place <= len(text) for place in of_tokens)


def test_starts_around_characters_that_are_never_finished() -> None:
    smile = list("🚀".encode())
    assert starts(IncrementalDetokenizer(BYTES), [0x61, *smile[:2], 0x62, SPECIAL, 0x63]) == (
        [0, 1, 1, 2, 3, 3],
        "a\ufffdbc",
    )
    unfinished_prompt = IncrementalDetokenizer(BYTES, prompt_token_ids=smile[:2])
    assert starts(unfinished_prompt, [*smile[2:], 0x61]) == ([0, 0, 1], "🚀a")
    unfinished_prompt = IncrementalDetokenizer(BYTES, prompt_token_ids=smile[:2])
    assert starts(unfinished_prompt, [0x61, 0x62]) == ([0, 1], "ab")


def test_starts_where_the_leading_space_is_not_shown() -> None:
    assert starts(IncrementalDetokenizer(PIECES), piece("▁a", "▁a", "a")) == ([0, 1, 3], "a aa")
