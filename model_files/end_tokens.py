"""Which tokens end an answer: the one place that decides it, for every file format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from model_files.gguf import GgufFile, GgufValue
from model_files.json_files import ModelFileError, read_json, read_json_if_present

# Ends of a turn that a model's files may leave out of their EOS ids; taken where they are control tokens.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_CONTROL = 3  # in tokenizer.ggml.token_type


def end_token_ids(model: GgufFile | Path) -> tuple[int, ...]:
    """The ids of the tokens that end an answer, ascending. ``model`` is a GGUF file or a Hugging Face folder.

    Those are the tokens that the files name as ends: in GGUF the ids of eos, eot and eom; in a folder
    ``eos_token_id`` of config.json and generation_config.json (a number or a list) and ``eos_token`` of
    tokenizer_config.json or special_tokens_map.json. Control tokens that are spelled like the end of a turn
    (``<|im_end|>``) are ends as well: the files of a chat model may name the end of a text only, and its
    answers would run on past their turn.

    Raises ModelFileError for an entry of a wrong type or outside the vocabulary.
    """
    if isinstance(model, Path):
        return _ends_of_folder(model)
    return _ends_of_gguf(str(model.path), model.metadata)


def _ends_of_gguf(place: str, metadata: Mapping[str, GgufValue]) -> tuple[int, ...]:
    tokens = _list(place, metadata, "tokenizer.ggml.tokens")
    types = _list(place, metadata, "tokenizer.ggml.token_type")
    ends = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_OF_TURN
    }
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if type(token_id) is not int:
            raise ModelFileError(f"{place}: {key} is {token_id!r}; a token id is expected")
        _check_range(f"{place}: {key}", [token_id], len(tokens) or None)
        ends.add(token_id)
    return tuple(sorted(ends))


def _list(place: str, metadata: Mapping[str, GgufValue], key: str) -> list[GgufValue]:
    values = metadata.get(key, [])
    if not isinstance(values, list):
        raise ModelFileError(f"{place}: {key} is {values!r}; a list is expected")
    return values


class _EndIds(msgspec.Struct):
    """Of config.json and generation_config.json."""

    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None

    @property
    def ids(self) -> list[int]:
        if self.eos_token_id is None:
            return []
        return self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]


class _Content(msgspec.Struct):
    content: str


class _SpecialTokens(msgspec.Struct):
    """Of tokenizer_config.json and special_tokens_map.json."""

    eos_token: str | _Content | None = None

    @property
    def text(self) -> str | None:
        return self.eos_token.content if isinstance(self.eos_token, _Content) else self.eos_token


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    """Of tokenizer.json. The vocabulary, which is large, is decoded only where it is needed."""

    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list)
    model: msgspec.Raw = msgspec.Raw(b"null")


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw] = msgspec.field(default_factory=list)


def _ends_of_folder(folder: Path) -> tuple[int, ...]:
    config = read_json_if_present(folder / "config.json", _EndIds)
    ends = set(config.ids)
    _check_range(f"{folder / 'config.json'}: eos_token_id", config.ids, config.vocab_size)
    generation = read_json_if_present(folder / "generation_config.json", _EndIds)
    ends.update(generation.ids)
    _check_range(f"{folder / 'generation_config.json'}: eos_token_id", generation.ids, config.vocab_size)
    if (folder / "tokenizer.json").is_file():
        tokenizer = read_json(folder / "tokenizer.json", _Tokenizer)
        ends.update(
            token.id for token in tokenizer.added_tokens if token.special and token.content in _END_OF_TURN
        )
        ends.update(_named_end(folder, tokenizer))
    return tuple(sorted(ends))


def _named_end(folder: Path, tokenizer: _Tokenizer) -> Collection[int]:
    """The id of the tokenizer's EOS token, if it has one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        text = read_json_if_present(folder / name, _SpecialTokens).text
        if text is None:
            continue
        ids = {token.content: token.id for token in tokenizer.added_tokens}
        if text not in ids:  # seldom: an EOS token that is an entry of the vocabulary only
            model = msgspec.json.decode(tokenizer.model, type=_Vocabulary | None)
            ids = model.vocab if model is not None and isinstance(model.vocab, dict) else {}
        if text not in ids:
            raise ModelFileError(
                f"{folder / name}: eos_token is {text!r}, which is not in the vocabulary of tokenizer.json"
            )
        return (ids[text],)
    return ()


def _check_range(key: str, token_ids: Iterable[int], vocab_size: int | None) -> None:
    for token_id in token_ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            of = "" if vocab_size is None else f" of {vocab_size} tokens"
            raise ModelFileError(f"{key} is {token_id}, outside the vocabulary{of}")
