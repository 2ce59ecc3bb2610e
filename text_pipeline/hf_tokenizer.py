"""Builds a tokenizer from the files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer as BackendTokenizer

from text_pipeline.tokenizer import BYTE_LEVEL, PieceFormat, Tokenizer, TokenizerError

T = TypeVar("T")

_SPACE_MARK = "▁"


class _Token(msgspec.Struct):
    content: str


class _SpecialTokens(msgspec.Struct):
    """special_tokens_map.json"""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None


class _TokenizerConfig(_SpecialTokens):
    """tokenizer_config.json"""

    add_bos_token: bool | None = None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _ChatTemplates(msgspec.Struct):
    """tokenizer_config.json and chat_template.json"""

    chat_template: str | list[_NamedTemplate] | dict[str, str] | None = None


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a folder: tokenizer.json, with the BOS token that its neighbours name.

    Raises TokenizerError where a file is missing or broken, or a decoder is of an unknown kind.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        hint = " (tokenizer.model alone is not read)" if (path / "tokenizer.model").is_file() else ""
        raise TokenizerError(f"{path} has no tokenizer.json{hint}")
    try:
        backend = BackendTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from None
    # A file may carry the settings of some training run; a prompt is never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    config = _read(path / "tokenizer_config.json", _TokenizerConfig)
    bos_token, _ = special_token_texts_of_folder(path)
    bos_token_id = _token_id(backend, bos_token, "bos_token", path)
    prefix, suffix = _surrounding_token_ids(backend, file)
    prefix = _with_bos(prefix, bos_token_id, config.add_bos_token)
    return Tokenizer(
        backend,
        _piece_format(backend, file),
        bos_token_id=bos_token_id,
        prefix_token_ids=prefix,
        suffix_token_ids=suffix,
    )


def special_token_texts_of_folder(path: Path) -> tuple[str | None, str | None]:
    """The texts of the BOS and the EOS token, as a chat template wants them; None where there is none."""
    config = _read(path / "tokenizer_config.json", _TokenizerConfig)
    fallback = _read(path / "special_tokens_map.json", _SpecialTokens)
    return (
        _text(config.bos_token) or _text(fallback.bos_token),
        _text(config.eos_token) or _text(fallback.eos_token),
    )


def chat_templates_of_folder(path: Path) -> dict[str, str]:
    """The chat templates in the folder by name; the main one is ``default``. Empty where there is none.

    Read, the last one winning: ``chat_template`` in tokenizer_config.json (one text, or a list of named
    ones), chat_template.json, chat_template.jinja and additional_chat_templates/NAME.jinja.
    """
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        templates.update(_named_templates(_read(path / name, _ChatTemplates).chat_template))
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path / "chat_template.jinja")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _read(file: Path, kind: type[T]) -> T:
    """The JSON object in ``file``; with the defaults of ``kind`` where the file does not exist."""
    if not file.is_file():
        return kind()
    try:
        return msgspec.json.decode(_read_text(file), type=kind)
    except msgspec.ValidationError as error:
        raise TokenizerError(f"{file}: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is not valid UTF-8: {error}") from None


def _named_templates(value: str | list[_NamedTemplate] | dict[str, str] | None) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            return {entry.name: entry.template for entry in value}
        case _:
            return value


def _text(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token


def _token_id(backend: BackendTokenizer, text: str | None, name: str, path: Path) -> int | None:
    if text is None:
        return None
    token_id: int | None = backend.token_to_id(text)
    if token_id is None:
        raise TokenizerError(f"{path}: {name} is {text!r}, which is not in the vocabulary of tokenizer.json")
    return token_id


def _surrounding_token_ids(backend: BackendTokenizer, file: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the file's post-processor puts before and after a text, found with a probe."""
    plain = tuple(backend.encode("a", add_special_tokens=False).ids)
    whole = tuple(backend.encode("a", add_special_tokens=True).ids)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise TokenizerError(
        f"{file}: its post_processor changes the tokens of a text; only a prefix and suffix work"
    )


def _with_bos(prefix: tuple[int, ...], bos_token_id: int | None, wanted: bool | None) -> tuple[int, ...]:
    """Applies an explicit ``add_bos_token``, which overrides what tokenizer.json does."""
    if bos_token_id is None or wanted is None or wanted == (bos_token_id in prefix):
        return prefix
    if wanted:
        return (bos_token_id, *prefix)
    return tuple(token_id for token_id in prefix if token_id != bos_token_id)


def _piece_format(backend: BackendTokenizer, file: Path) -> PieceFormat:
    """Reads from the file's decoder how its vocabulary spells bytes."""
    if backend.decoder is None:
        raise TokenizerError(f"{file} has no decoder; known are ByteLevel and SentencePiece-like ones")
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return BYTE_LEVEL
    strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "Metaspace", "replacement": "▁"}:
                strips = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise TokenizerError(
                    f"{file}: its decoder has the step {json.dumps(step)}; known are ByteLevel, and of "
                    f"SentencePiece-like ones Metaspace, Replace {_SPACE_MARK!r}, ByteFallback, Fuse, Strip"
                )
    if not {"Replace", "Metaspace"} & set(kinds):
        raise TokenizerError(f"{file}: its decoder {kinds} does not say how spaces are spelled")
    return PieceFormat("sentencepiece", byte_fallback="ByteFallback" in kinds, strips_leading_space=strips)


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
