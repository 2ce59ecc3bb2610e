"""Turns a stream of token ids into text, byte-exact."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from text_pipeline.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """The text of one sequence, token by token.

    Tokens become bytes and the bytes go through one incremental UTF-8 decoder, so that text comes out as
    soon as it is certain: only the bytes of an unfinished character are held back, and invalid bytes
    become U+FFFD at once. Everything :meth:`push` and :meth:`finish` return, joined, is the bytes of all
    tokens decoded in one go with ``errors="replace"``, whatever the calls' sizes. Ids outside the
    vocabulary (and -1) are skipped.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """``prompt_token_ids`` is the text before the first pushed token; nothing of it is ever returned.

        It matters in two cases: a prompt that ends inside a character, which the first pushed bytes may
        finish, and SentencePiece models, where only the very start of a text loses its leading space.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished_prompt = self._unfinished_character(prompt_token_ids)
        self._num_characters = 0  # returned so far
        self._at_start = tokenizer.piece_format.strips_leading_space and not any(
            self._bytes(token_id) for token_id in prompt_token_ids
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that has become certain with ``token_ids``; often empty inside a multi-byte character."""
        raw = b"".join(map(self._bytes, token_ids))
        if not raw:
            return ""
        if self._at_start:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        if self._unfinished_prompt:
            unfinished, self._unfinished_prompt = self._unfinished_prompt, b""
            if raw and _continues(unfinished, raw[0]):
                self._decoder.decode(unfinished)
        text = self._decoder.decode(raw)
        self._num_characters += len(text)
        return text

    def start_of(self, token_id: int) -> int:
        """Where the text of ``token_id`` will begin if it is pushed next, in characters of all text returned.

        That is the unfinished character where it goes on with one, and the end where it has no text.
        """
        raw = self._bytes(token_id)
        unfinished = bytes(self._decoder.getstate()[0])
        if raw and unfinished and not _continues(unfinished, raw[0]):
            return self._num_characters + len(unfinished.decode(errors="replace"))
        return self._num_characters

    def finish(self) -> str:
        """The held-back bytes of an unfinished character, as U+FFFD; the end of the stream."""
        return self._decoder.decode(b"", True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped or not self._tokenizer.has_token(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _unfinished_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The start of a character at the very end of the prompt, or no bytes."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(tail)
        return bytes(decoder.getstate()[0])


def _continues(unfinished: bytes, byte: int) -> bool:
    """Whether ``byte`` may follow the unfinished character: together still unfinished, or whole."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(unfinished + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True
