"""How ``/v1/chat/completions`` writes its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cluster.messages import TokenLogprobs
from router.api.request.schemas import ChatCompletionRequest
from router.api.response.choices import ChoiceDelta
from router.api.response.logprobs import chat_logprobs
from router.api.response.respond import FinishedChoice
from text_pipeline.tokenizer import Tokenizer


class ChatShape:
    """Writes the choices of one chat request."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatCompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        """A choice of the ``chat.completion``."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that names the role."""
        return _chunk_choice(index, {"role": "assistant", "content": "", "refusal": None})

    def pieces(self, index: int, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """The text, and the end in a chunk of its own."""
        if delta.text or (self._wants_logprobs and delta.logprobs):
            yield _chunk_choice(index, {"content": delta.text}, logprobs=self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            yield _chunk_choice(index, {}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(positions, self._num_top, self._tokenizer) if self._wants_logprobs else None


def _chunk_choice(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
