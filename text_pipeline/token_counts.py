"""How many tokens a text has at least, without encoding it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from text_pipeline.tokenizer import Tokenizer

_NFC_SHRINKS_BY = (
    4  # the most is 3, where three conjoining jamo of 3 bytes each become one syllable of 3 bytes
)
_SPACE_MARK_SHRINKS_BY = 3  # the 3 bytes of U+2581 in a text mean the one byte of a space


class MinTokenCount:
    """Counts the tokens that a text has at least: its bytes, divided by those of the longest token.

    Only what the tokenizer's parts are known to keep is counted, so that no text which fits is ever taken for
    too long: bytes that the vocabulary lacks vanish, and so may whitespace beside some added tokens. With a
    part whose effect is not known (a normalizer that may shorten a text without a bound, unknown characters
    that become one token) the count is 0 for every text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = {
            tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.vocab_size)
            if tokenizer.has_token(token_id)
        }
        self._vanishing = b""
        if tokenizer.piece_format.kind == "byte_level":
            self._vanishing = bytes(byte for byte in range(256) if bytes([byte]) not in tokens)
        self._whitespace_may_vanish = any(
            token.strips_left or token.strips_right for token in tokenizer.added_tokens
        )
        # Bytes of a text that one token stands for at most; 0 where that is not known.
        self._max_bytes_per_token = max(map(len, tokens), default=0) * _shrinks_by(
            tokenizer, loses_bytes=bool(self._vanishing)
        )

    def of(self, text: str) -> int:
        """The least number of tokens of ``text``, which takes far less time than encoding it."""
        if not self._max_bytes_per_token:
            return 0
        if self._whitespace_may_vanish:
            text = "".join(text.split())
        raw = text.encode(errors="surrogatepass").translate(None, self._vanishing)
        return -(-len(raw) // self._max_bytes_per_token)


def _shrinks_by(tokenizer: Tokenizer, *, loses_bytes: bool) -> int:
    """By how much the bytes of a text may become fewer before tokens stand for them; 0: without a bound."""
    normalizers = [step["type"] for step in _steps(tokenizer.normalizer)]
    if not all(_keeps_all(step) for step in _steps(tokenizer.pre_tokenizer)):
        return 0
    if tokenizer.piece_format.kind == "byte_level":
        if not normalizers:
            return 1
        # Bytes that the vocabulary has may become others that it lacks.
        return _NFC_SHRINKS_BY if set(normalizers) == {"NFC"} and not loses_bytes else 0
    has_all_bytes = all(tokenizer.token_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if not (tokenizer.piece_format.byte_fallback and has_all_bytes):
        return 0
    only_spaces = all(
        step["type"] == "Prepend" or (step["type"] == "Replace" and step["pattern"] == {"String": " "})
        for step in _steps(tokenizer.normalizer)
    )
    return _SPACE_MARK_SHRINKS_BY if only_spaces else 0


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether all of a text is still there after this step."""
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _steps(inner)
