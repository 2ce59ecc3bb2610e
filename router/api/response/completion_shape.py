"""How ``/v1/completions`` writes its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cluster.messages import TokenLogprobs
from router.api.request.generation_spec import GenerationSpec
from router.api.request.schemas import CompletionRequest
from router.api.response.choices import ChoiceDelta
from router.api.response.logprobs import completion_logprobs
from router.api.response.respond import FinishedChoice
from text_pipeline.detokenizer import IncrementalDetokenizer
from text_pipeline.tokenizer import Tokenizer


class CompletionShape:
    """Writes the choices of one completion request."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: GenerationSpec,
        body: CompletionRequest,
        echo: Sequence[str],
    ) -> None:
        """``echo`` is the prompts' text, if it is to be repeated, or empty."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._num_top = body.logprobs
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}  # by choice: where its next token begins
        self._echo = echo

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        """A choice of the whole ``text_completion``."""
        return {
            "index": index,
            "text": self._echo_of(index) + choice.text,
            "logprobs": self._logprobs(index, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed."""
        return _chunk_choice(index, self._echo_of(index)) if self._echo else None

    def pieces(self, index: int, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """The text, and the end in a chunk of its own."""
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs is not None:
            yield _chunk_choice(index, delta.text, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield _chunk_choice(index, "", finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        detokenizer = self._detokenizers.get(index)
        if detokenizer is None:
            detokenizer = self._detokenizers[index] = IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=self._spec.skip_special_tokens,
                prompt_token_ids=self._spec.text_before(index),
            )
        return completion_logprobs(positions, self._num_top, self._tokenizer, detokenizer)

    def _echo_of(self, index: int) -> str:
        return self._echo[index // self._spec.n] if self._echo else ""


def _chunk_choice(index: int, text: str, **fields: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **fields}
