"""A model's tokenizer: text to token ids, token ids to exact bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import tokenizers


class TokenizerError(ValueError):
    """The tokenizer files cannot be used, or a text or id given to it is impossible; the message says
    which.
    """


@dataclass(frozen=True)
class PieceFormat:
    """How a vocabulary entry spells its bytes.

    ``byte_level``: every byte is one character of GPT-2's printable alphabet. ``sentencepiece``: the text
    itself with U+2581 for a space, and, with ``byte_fallback``, single bytes as ``<0x0A>``.
    ``strips_leading_space``: encoding put a space before the text, so the first one of a decoded text is
    not shown.
    """

    kind: Literal["byte_level", "sentencepiece"]
    byte_fallback: bool = False
    strips_leading_space: bool = False


BYTE_LEVEL = PieceFormat("byte_level")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text as it is, before the text is cut into words.

    ``strips_left`` and ``strips_right``: it takes the whitespace beside it along.
    """

    token_id: int
    text: str
    is_special: bool
    strips_left: bool
    strips_right: bool


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100
    onward.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHARACTER = MappingProxyType(_byte_alphabet())
_SPACE_MARK = "▁"  # SentencePiece's visible space


class Tokenizer:
    """Encodes text and gives the exact bytes of every token. Safe to use from several threads.

    ``prefix_token_ids`` and ``suffix_token_ids`` are what ``add_special_tokens`` puts around a text (a
    BOS, say). A token is *special* where the model's files mark it as a control token; special and other
    added tokens are found in a text as they are, before it is cut into words.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        piece_format: PieceFormat,
        *,
        bos_token_id: int | None,
        prefix_token_ids: Iterable[int] = (),
        suffix_token_ids: Iterable[int] = (),
    ) -> None:
        """Takes ``backend`` over: it must not be changed afterwards."""
        self._backend = backend
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._plain_backend_lock = threading.Lock()
        self.piece_format = piece_format
        added = backend.get_added_tokens_decoder()
        self.added_tokens = tuple(
            AddedToken(token_id, token.content, token.special, token.lstrip, token.rstrip)
            for token_id, token in added.items()
        )
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.bos_token_id = bos_token_id
        self.prefix_token_ids = tuple(prefix_token_ids)
        self.suffix_token_ids = tuple(suffix_token_ids)
        for token_id in (bos_token_id, *self.prefix_token_ids, *self.suffix_token_ids):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"the special token id {token_id} is outside the vocabulary of {self.vocab_size}"
                )
        self._bytes_of: dict[int, bytes | None] = {}  # filled as asked; at most vocab_size entries

    @property
    def add_bos(self) -> bool:
        """Whether ``add_special_tokens`` starts a text with the BOS token."""
        return self.bos_token_id is not None and self.bos_token_id in self.prefix_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """The token ids of ``text``.

        ``add_special_tokens`` adds the model's own prefix and suffix (BOS, EOS), as for a raw prompt; a
        chat template writes them itself. With ``parse_special`` the text of a special token becomes that
        token, as a rendered chat and a raw prompt need; without it such text is encoded letter by letter
        like any other, which is how to encode text of a user on its own so that it cannot name a special
        token. Raises TokenizerError where ``text`` holds a lone surrogate, which has no UTF-8 form.
        """
        backend = self._backend if parse_special else self._without_special_parsing()
        (token_ids,) = encode_texts(backend, (text,))
        if add_special_tokens:
            return [*self.prefix_token_ids, *token_ids, *self.suffix_token_ids]
        return token_ids

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """What ``encode`` gives for each of ``texts`` alone, in one call. Raises TokenizerError."""
        return encode_texts(self._backend, texts)

    @property
    def normalizer(self) -> dict[str, Any] | None:
        """What changes a text before it is cut into words, as in tokenizer.json; None where nothing does."""
        return _described(self._backend.normalizer)

    @property
    def pre_tokenizer(self) -> dict[str, Any] | None:
        """What cuts a text into words, as in tokenizer.json; None where nothing does."""
        return _described(self._backend.pre_tokenizer)

    def description(self) -> dict[str, Any]:
        """The whole of tokenizer.json: a fresh object, and slow to make."""
        description: dict[str, Any] = json.loads(self._backend.to_str())
        return description

    def _without_special_parsing(self) -> tokenizers.Tokenizer:
        """A copy of the backend, made when first asked: the setting cannot be changed while others encode."""
        with self._plain_backend_lock:
            if self._plain_backend is None:
                backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
                backend.encode_special_tokens = True
                self._plain_backend = backend
            return self._plain_backend

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled ``text`` in the vocabulary (a special token's text, say), or None."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a special (control) token."""
        return token_id in self._special

    def has_token(self, token_id: int) -> bool:
        """Whether ``token_id`` is in the vocabulary; a model's padded logits can name ids that are not."""
        return self._bytes_or_none(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, which need not be whole characters. Raises TokenizerError for an
        unknown id.
        """
        raw = self._bytes_or_none(token_id)
        if raw is None:
            raise TokenizerError(f"no token has the id {token_id}; the vocabulary has {self.vocab_size} ids")
        return raw

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``: their bytes joined and read as UTF-8, invalid bytes as U+FFFD.

        Ids outside the vocabulary are skipped.
        """
        raw = b"".join(
            self._bytes_or_none(token_id) or b""
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self._special)
        )
        if self.piece_format.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", errors="replace")

    def _bytes_or_none(self, token_id: int) -> bytes | None:
        try:
            return self._bytes_of[token_id]
        except KeyError:
            pass
        if not 0 <= token_id < self.vocab_size:
            return None  # not remembered: the memory of impossible ids would have no bound
        raw = self._spell(token_id)
        self._bytes_of[token_id] = raw
        return raw

    def _spell(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            text = self._added[token_id]
            if self.piece_format.kind == "sentencepiece" and token_id not in self._special:
                text = text.replace(_SPACE_MARK, " ")
            return text.encode()
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return None
        if self.piece_format.kind == "byte_level":
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in piece])
            except KeyError:  # an entry outside the alphabet (a placeholder, say) is its own text
                return piece.encode()
        if (
            self.piece_format.byte_fallback
            and len(piece) == 6
            and piece.startswith("<0x")
            and piece[5] == ">"
        ):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace(_SPACE_MARK, " ").encode()


def _described(step: Any) -> dict[str, Any] | None:
    description: dict[str, Any] | None = None if step is None else json.loads(step.__getstate__())
    return description


def encode_texts(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text. Other Python threads run meanwhile, which ``backend.encode`` would stop.

    Raises TokenizerError where a text holds a lone surrogate.
    """
    try:
        return [encoded.ids for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)]
    except TypeError:
        wrong = next(text for text in texts if any(0xD800 <= ord(character) <= 0xDFFF for character in text))
        raise TokenizerError(_surrogate_message(wrong)) from None


def _surrogate_message(text: str) -> str:
    for position, character in enumerate(text):
        if 0xD800 <= ord(character) <= 0xDFFF:
            code = f"U+{ord(character):04X}"
            return f"the text is not valid Unicode: character {position} is the lone surrogate {code}"
    raise AssertionError("a text that the library refuses has no lone surrogate")
