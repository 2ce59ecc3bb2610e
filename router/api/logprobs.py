"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.messages import TokenLogprobs
from text_pipeline.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no minus infinity; OpenAI's stand-in


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
    positions: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer, text_offset: int
) -> dict[str, Any]:
    """The ``logprobs`` object of a legacy completion.

    ``text_offset`` is where the first of ``positions`` starts in the choice's text, in characters. As in
    OpenAI's API the sampled token is always among its ``top_logprobs``.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for position in positions:
        text = _text(position.token_id, tokenizer)
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        alternatives = {_text(i, tokenizer): _clamp(logprob) for i, logprob in position.top[:num_top]}
        alternatives.setdefault(text, _clamp(position.logprob))
        top.append(alternatives)
    return {
        "tokens": tokens,
        "token_logprobs": [_clamp(position.logprob) for position in positions],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": _text(token_id, tokenizer),
        "logprob": _clamp(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)) if tokenizer.has_token(token_id) else [],
    }


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    # A model's logits can be wider than its vocabulary; such ids have no text.
    return tokenizer.token_text(token_id) if tokenizer.has_token(token_id) else ""


def _clamp(logprob: float) -> float:
    return max(logprob, _FLOOR)
