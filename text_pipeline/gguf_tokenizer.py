"""Builds a tokenizer from the ``tokenizer.ggml.*`` metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from text_pipeline.tokenizer import BYTE_LEVEL, Tokenizer, TokenizerError

T = TypeVar("T")

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# The published word patterns of each family. All whitespace and digits stay in some piece: a Split keeps what
# its pattern does not match as a piece of its own.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut into words before BPE. ``patterns`` cut one after the other, each the pieces of the
    last.

    ``ignore_merges``: a word that is a vocabulary entry is that token, whatever the merges would give.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say
    normalizes_nfc: bool = False


_SMOLLM = _PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_BPE = _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = MappingProxyType(
    {
        "smollm": _SMOLLM,
        "gpt-2": _PreTokenizer((_GPT2,)),
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
        "qwen2": _PreTokenizer((_QWEN2,), normalizes_nfc=True),
        "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
        "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    }
)


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes.

    ``tokenizer.ggml.model`` must be ``gpt2`` (byte-level BPE) and ``tokenizer.ggml.pre`` one of the
    pre-tokenizers known here; a file without ``pre`` gets ``default``. Raises TokenizerError, which names an
    unknown model or pre-tokenizer, or the entry that is missing or malformed.
    """
    model = _field(metadata, "tokenizer.ggml.model", str)
    if model != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model is {model!r}; supported is 'gpt2' (byte-level BPE)")
    pre = _field(metadata, "tokenizer.ggml.pre", str, "default")
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    token_types = _token_types(metadata, len(tokens))
    backend = _byte_level_bpe(tokens, _strings(metadata, "tokenizer.ggml.merges"), _PRE_TOKENIZERS[pre])
    _add_special_tokens(backend, tokens, token_types)
    bos_token_id = _token_id(metadata, "bos", len(tokens))
    eos_token_id = _token_id(metadata, "eos", len(tokens))
    adds_bos = _field(metadata, "tokenizer.ggml.add_bos_token", bool, _PRE_TOKENIZERS[pre].add_bos)
    adds_eos = _field(metadata, "tokenizer.ggml.add_eos_token", bool, False)
    return Tokenizer(
        backend,
        BYTE_LEVEL,
        bos_token_id=bos_token_id,
        prefix_token_ids=() if bos_token_id is None or not adds_bos else (bos_token_id,),
        suffix_token_ids=() if eos_token_id is None or not adds_eos else (eos_token_id,),
    )


def special_token_texts(metadata: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The texts of the BOS and the EOS token, as a chat template wants them; None where there is none."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    bos_token_id = _token_id(metadata, "bos", len(tokens))
    eos_token_id = _token_id(metadata, "eos", len(tokens))
    return (
        None if bos_token_id is None else tokens[bos_token_id],
        None if eos_token_id is None else tokens[eos_token_id],
    )


def chat_templates_from_gguf(metadata: Mapping[str, object]) -> dict[str, str]:
    """The chat templates in the file by name; the main one is ``default``. Empty where there is none."""
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            templates["default"] = value
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return templates


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: _PreTokenizer) -> BackendTokenizer:
    # An entry without text cannot be reached by encoding; it still needs a spelling of its own.
    named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)] if "" in tokens else tokens
    vocabulary = dict(zip(named, range(len(named)), strict=True))
    if len(vocabulary) != len(named):
        repeated = next(token for index, token in enumerate(named) if vocabulary[token] != index)
        raise TokenizerError(f"tokenizer.ggml.tokens has the token {repeated!r} more than once")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    except ValueError:
        wrong = next(merge for merge in merges if merge.count(" ") != 1)
        raise TokenizerError(
            f"tokenizer.ggml.merges has {wrong!r}; a merge is two tokens and a space"
        ) from None
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises plain Exception: a merge of tokens that do not exist
        raise TokenizerError(f"tokenizer.ggml.tokens and merges do not fit: {error}") from None
    backend = BackendTokenizer(model)
    if pre.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(backend: BackendTokenizer, tokens: list[str], token_types: list[int]) -> None:
    """Marks control tokens as special and user-defined ones as added, in one call each."""

    def added(special: bool, wanted: Callable[[int], bool]) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, token_types, strict=True)
            if wanted(token_type) and token
        ]

    backend.add_special_tokens(added(True, lambda token_type: token_type in (_CONTROL, _UNKNOWN)))
    backend.add_tokens(added(False, lambda token_type: token_type == _USER_DEFINED))


def _field(metadata: Mapping[str, object], key: str, kind: type[T], default: T | None = None) -> T:
    value = metadata.get(key, default)
    if value is None:
        raise TokenizerError(f"the GGUF metadata has no {key}")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TokenizerError(f"{key} is {str(value)[:80]!r}; expected {kind.__name__}")
    return value


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _field(metadata, key, list)
    if not values or not all(map(str.__instancecheck__, values)):
        raise TokenizerError(f"{key} must be a list of strings that is not empty")
    return values


def _token_types(metadata: Mapping[str, object], count: int) -> list[int]:
    token_types = _field(metadata, "tokenizer.ggml.token_type", list, [1] * count)
    if len(token_types) != count:
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(token_types)} entries for {count} tokens")
    return token_types


def _token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    token_id = _field(metadata, key, int)
    if not 0 <= token_id < count:
        raise TokenizerError(f"{key} is {token_id}; the vocabulary has {count} tokens")
    return token_id
