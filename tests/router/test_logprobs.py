"""Log-probabilities where tokens are no whole characters, have the same text, or have none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as BackendTokenizer

from cluster.messages import TokenLogprobs
from router.api.response.logprobs import chat_logprobs, completion_logprobs, spelling
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import EOS, ScriptedWorker, answer
from text_pipeline.detokenizer import IncrementalDetokenizer
from text_pipeline.tokenizer import PieceFormat, Tokenizer

MakeWorker = Callable[..., ScriptedWorker]
TEXT = "Hi 👩‍🚀! 漢字と\nひらがな é\\ 🤷🏽‍♀️ ok"

# Every byte as a token of its own, and pieces: several with the same text, some that look like our spellings.
PIECES = [
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("a", "é", "漢", "▁", " ", "bytes:\\xf0", "bytes:", "token_id:258", "<0xZZ>", "\\"),
]
NUM_IDS = len(PIECES) + 3  # a special token, and two ids outside the vocabulary
ALIKE = [PIECES.index(piece) for piece in ("a", "<0x61>", "▁", " ", "<0x20>", "\\", "<0x5C>")]
IDS = st.sampled_from(ALIKE) | st.integers(0, NUM_IDS - 1)
POSITIONS = st.lists(st.tuples(IDS, st.lists(IDS, unique=True, max_size=8)), max_size=12)


def sentencepiece() -> Tokenizer:
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return Tokenizer(backend, PieceFormat("sentencepiece", byte_fallback=True), bos_token_id=None)


PIECE_TOKENIZER = sentencepiece()


def position(token_id: int, others: Iterable[int]) -> TokenLogprobs:
    """The sampled token and the most likely ones, each with a value of its own that its id gives."""
    top = tuple((other, value_of(other)) for other in sorted(others))
    return TokenLogprobs(token_id=token_id, logprob=value_of(token_id), rank=1, top=top)


def value_of(token_id: int) -> float:
    return -float(token_id + 1) / 1000


def named_bytes(name: str, tokenizer: Tokenizer) -> bytes | int:
    """What a name means, as the documentation says: the bytes of a token, or its id."""
    if name.startswith("token_id:"):
        return int(name.removeprefix("token_id:"))
    if name.startswith("bytes:"):
        spelled = name.removeprefix("bytes:").encode()
        return re.sub(
            rb"\\(\\|x[0-9a-f]{2})",
            lambda match: b"\\" if match[1] == b"\\" else bytes([int(match[1][1:], 16)]),
            spelled,
        )
    return name.encode()


# --- the spelling of one token -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("a", "a"),
        ("<0x61>", "a"),
        ("漢", "漢"),
        ("▁", " "),
        ("<0x0A>", "\n"),
        ("<0xF0>", "bytes:\\xf0"),
        ("bytes:\\xf0", "bytes:bytes:\\\\xf0"),
        ("bytes:", "bytes:bytes:"),
        ("token_id:258", "bytes:token_id:258"),
        ("\\", "\\"),
        ("<0xZZ>", "<0xZZ>"),
    ],
)
def test_spelling(piece: str, expected: str) -> None:
    assert spelling(PIECES.index(piece), PIECE_TOKENIZER) == expected


def test_spelling_of_special_tokens_and_of_ids_without_text() -> None:
    assert spelling(len(PIECES), PIECE_TOKENIZER) == "<end>"
    assert spelling(len(PIECES) + 1, PIECE_TOKENIZER) == f"token_id:{len(PIECES) + 1}"


def test_spelling_of_part_of_a_character_and_more(tokenizer: Tokenizer) -> None:
    names = [spelling(token_id, tokenizer) for token_id in tokenizer.encode("a 🚀")]
    assert names[0] == "a"
    assert names[1].startswith("bytes: \\xf0")  # a printable byte stands for itself
    assert all(name.startswith("bytes:\\x") for name in names[2:])


def test_every_token_of_the_bundled_model_can_be_read_back(tokenizer: Tokenizer) -> None:
    names: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        name = spelling(token_id, tokenizer)
        assert named_bytes(name, tokenizer) == tokenizer.token_bytes(token_id)
        assert name not in names
        names[name] = token_id


# --- both shapes -------------------------------------------------------------------------------------------


@given(POSITIONS)
def test_a_completion_has_every_alternative_with_its_value(given: list[tuple[int, list[int]]]) -> None:
    num_top = 8
    detokenizer = IncrementalDetokenizer(PIECE_TOKENIZER)
    body = completion_logprobs([position(*one) for one in given], num_top, PIECE_TOKENIZER, detokenizer)
    assert body["token_logprobs"] == [value_of(token_id) for token_id, _ in given]
    for (token_id, others), name, alternatives in zip(
        given, body["tokens"], body["top_logprobs"], strict=True
    ):
        wanted = {token_id, *others}
        assert sorted(alternatives.values()) == sorted(value_of(one) for one in wanted)
        assert name == spelling(token_id, PIECE_TOKENIZER)
        assert alternatives[name] == value_of(token_id)
        for alternative, value in alternatives.items():
            meant = named_bytes(alternative, PIECE_TOKENIZER)
            (of_value,) = (one for one in wanted if value_of(one) == value)
            assert meant in (of_value, bytes_of(of_value))


@given(POSITIONS)
def test_a_chat_has_every_alternative_with_its_bytes(given: list[tuple[int, list[int]]]) -> None:
    body = chat_logprobs([position(*one) for one in given], 8, PIECE_TOKENIZER)
    for (token_id, others), entry in zip(given, body["content"], strict=True):
        assert entry["logprob"] == value_of(token_id)
        assert [one["logprob"] for one in entry["top_logprobs"]] == [value_of(one) for one in sorted(others)]
        for one, shown in zip([token_id, *sorted(others)], [entry, *entry["top_logprobs"]], strict=True):
            assert bytes(shown["bytes"]) == bytes_of(one)
            assert shown["token"] == spelling(one, PIECE_TOKENIZER)


@given(POSITIONS, st.lists(st.integers(0, 12), max_size=3))
def test_offsets_are_the_same_however_the_tokens_arrive(
    given: list[tuple[int, list[int]]], cuts: list[int]
) -> None:
    positions = [position(*one) for one in given]
    whole = completion_logprobs(positions, 2, PIECE_TOKENIZER, IncrementalDetokenizer(PIECE_TOKENIZER))
    edges = [0, *sorted(cuts), len(positions)]
    detokenizer = IncrementalDetokenizer(PIECE_TOKENIZER)
    parts = [
        completion_logprobs(positions[start:end], 2, PIECE_TOKENIZER, detokenizer)
        for start, end in pairwise(edges)
    ]
    for member in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in part[member]]
        assert joined == whole[member]


def test_of_tokens_with_one_text_the_sampled_one_has_the_name() -> None:
    letter, byte = PIECES.index("a"), PIECES.index("<0x61>")
    for sampled, other in ((letter, byte), (byte, letter)):
        body = completion_logprobs(
            [position(sampled, [letter, byte])], 2, PIECE_TOKENIZER, IncrementalDetokenizer(PIECE_TOKENIZER)
        )
        assert body["tokens"] == ["a"]
        assert body["top_logprobs"] == [{"a": value_of(sampled), f"token_id:{other}": value_of(other)}]


def test_of_two_alternatives_with_one_text_the_likelier_has_the_name() -> None:
    letter, byte, sampled = PIECES.index("a"), PIECES.index("<0x61>"), PIECES.index("é")
    one = TokenLogprobs(token_id=sampled, logprob=-3.0, rank=3, top=((letter, -1.0), (byte, -2.0)))
    body = completion_logprobs([one], 2, PIECE_TOKENIZER, IncrementalDetokenizer(PIECE_TOKENIZER))
    assert body["top_logprobs"] == [{"a": -1.0, f"token_id:{byte}": -2.0, "é": -3.0}]


def bytes_of(token_id: int) -> bytes:
    return PIECE_TOKENIZER.token_bytes(token_id) if PIECE_TOKENIZER.has_token(token_id) else b""


# --- over HTTP, with the bundled tokenizer -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_emoji_and_japanese(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer, stream: bool
) -> None:
    tokens = [*tokenizer.encode(TEXT), EOS]
    partial = [token for token in tokens if spelling(token, tokenizer).startswith("bytes:")]
    assert len(partial) > 10  # else this shows nothing
    others = partial[:5]  # which would all be one replacement character

    def logprobs(token_id: int) -> TokenLogprobs:
        return position(token_id, [*others[:4], token_id] if token_id not in others else others)

    worker = make_worker(script=answer(tokens, logprobs=logprobs))
    router = await start_router(worker)
    options: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 200, "logprobs": 5}
    if stream:
        chunks = [chunk async for chunk in await router.openai.completions.create(**options, stream=True)]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        shown = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    else:
        completion = await router.openai.completions.create(**options)
        text = completion.choices[0].text
        shown = [completion.choices[0].logprobs]
    assert text == TEXT
    names = [name for part in shown for name in part.tokens]
    values = [value for part in shown for value in part.token_logprobs]
    top = [alternatives for part in shown for alternatives in part.top_logprobs]
    offsets = [offset for part in shown for offset in part.text_offset]
    assert values == [value_of(token) for token in tokens]
    assert [len(alternatives) for alternatives in top] == [5] * len(tokens)
    assert [alternatives[name] for name, alternatives in zip(names, top, strict=True)] == values
    character_of = [index for index, character in enumerate(TEXT) for _ in character.encode()]
    begins, place = [], 0
    for token in tokens:
        begins.append(character_of[place] if place < len(character_of) else len(TEXT))
        place += len(tokenizer.token_bytes(token))
    assert offsets == begins


async def test_offsets_go_on_past_a_stop_string_that_was_cut_off(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("one two three four")
    worker = make_worker(
        script=answer([*tokens, EOS], logprobs=lambda token_id: position(token_id, [token_id]))
    )
    router = await start_router(worker)
    completion = await router.openai.completions.create(
        model=MODEL, prompt="Hello", max_tokens=50, logprobs=1, stop="two three"
    )
    (choice,) = completion.choices
    assert choice.text == "one "
    assert choice.logprobs.tokens == ["one", " two", " three"]
    assert choice.logprobs.text_offset == [0, 3, 7]


async def test_a_character_that_the_prompt_began(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    first, *rest = tokenizer.encode("🚀")
    end = tokenizer.encode("!")
    worker = make_worker(
        script=answer([*rest, *end], finish_reason="length", logprobs=lambda one: position(one, [one]))
    )
    router = await start_router(worker)
    completion = await router.openai.completions.create(model=MODEL, prompt=[first], max_tokens=9, logprobs=1)
    (choice,) = completion.choices
    assert choice.text == "🚀!"
    assert choice.logprobs.text_offset == [*([0] * len(rest)), 1]


async def test_chat_of_emoji_and_japanese(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(TEXT)
    worker = make_worker(
        script=answer(tokens, finish_reason="length", logprobs=lambda one: position(one, {one, *tokens[:19]}))
    )
    router = await start_router(worker)
    completion = await router.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], logprobs=True, top_logprobs=20
    )
    content = completion.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    for token, entry in zip(tokens, content, strict=True):
        assert len(entry.top_logprobs) == len({token, *tokens[:19]})
        assert len({one.token for one in entry.top_logprobs}) == len(entry.top_logprobs)
        assert [one.logprob for one in entry.top_logprobs if one.token == entry.token] == [entry.logprob]
