"""Log-probabilities in the two shapes of OpenAI's API.

Both name a token by a text, and a token need not have one: it may be a part of a character, or an id of a
model whose logits are wider than its vocabulary. ``spelling`` says how such tokens are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.messages import TokenLogprobs
from text_pipeline.detokenizer import IncrementalDetokenizer
from text_pipeline.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no minus infinity; OpenAI's stand-in
_BYTES, _TOKEN_ID = "bytes:", "token_id:"


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice or chunk: the sampled tokens, each with its alternatives."""
    return {
        "content": [
            {
                **_chat_entry(position.token_id, position.logprob, tokenizer),
                "top_logprobs": [
                    _chat_entry(token_id, logprob, tokenizer) for token_id, logprob in position.top[:num_top]
                ],
            }
            for position in positions
        ],
        "refusal": None,
    }


def completion_logprobs(
    positions: Sequence[TokenLogprobs],
    num_top: int,
    tokenizer: Tokenizer,
    detokenizer: IncrementalDetokenizer,
) -> dict[str, Any]:
    """The ``logprobs`` object of a legacy completion's choice or chunk.

    ``detokenizer`` has been given the choice's tokens before ``positions``, and is given those of
    ``positions``: it knows where each begins. As in OpenAI's API the sampled token is always among its
    ``top_logprobs``.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for position in positions:
        tokens.append(spelling(position.token_id, tokenizer))
        offsets.append(detokenizer.start_of(position.token_id))
        detokenizer.push((position.token_id,))
        top.append(_alternatives(position, num_top, tokenizer))
    return {
        "tokens": tokens,
        "token_logprobs": [_clamp(position.logprob) for position in positions],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }


def spelling(token_id: int, tokenizer: Tokenizer) -> str:
    """How a token is named: its text, ``bytes:…`` where its bytes are no whole characters, ``token_id:…``
    where it has none.

    In ``bytes:`` a printable ASCII character stands for itself (a backslash is doubled) and any other byte is
    written ``\\xf0``. A text that begins like one of the two forms is written in bytes, so that tokens with
    different bytes never share a name.
    """
    if not tokenizer.has_token(token_id):
        return f"{_TOKEN_ID}{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        pass
    else:
        if not text.startswith((_BYTES, _TOKEN_ID)):
            return text
    return _BYTES + "".join(_byte_spelling(byte) for byte in raw)


def _byte_spelling(byte: int) -> str:
    if byte == 0x5C:
        return "\\\\"
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}"


def _alternatives(position: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens and the sampled one. Of several with one name, the sampled or else the most
    likely one has it, and the others are named by their ids.
    """
    sampled = spelling(position.token_id, tokenizer)
    alternatives: dict[str, float] = {}
    for token_id, logprob in position.top[:num_top]:
        name = spelling(token_id, tokenizer)
        if token_id != position.token_id and (name == sampled or name in alternatives):
            name = f"{_TOKEN_ID}{token_id}"
        alternatives[name] = _clamp(logprob)
    alternatives[sampled] = _clamp(position.logprob)
    return alternatives


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": spelling(token_id, tokenizer),
        "logprob": _clamp(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)) if tokenizer.has_token(token_id) else [],
    }


def _clamp(logprob: float) -> float:
    return max(logprob, _FLOOR)
