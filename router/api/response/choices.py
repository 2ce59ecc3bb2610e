"""Turn one sequence's token outputs into text, logprobs and a finish reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cluster.messages import TokenLogprobs, TokenOutput
from text_pipeline.output_text import OutputText


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """What one engine output adds to a choice."""

    text: str = ""
    num_tokens: int = 0  # kept: tokens after a stop string's match do not count
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop" | "length"
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    is_stop_string: bool = False  # the worker does not know yet and must be told to stop


class ChoiceText:
    """State of one choice while it is generated."""

    def __init__(
        self,
        output_text: OutputText,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int],
        include_stop_in_output: bool,
    ) -> None:
        self._output_text = output_text
        self._eos_token_ids = frozenset(eos_token_ids)
        self._end_token_ids = self._eos_token_ids | frozenset(stop_token_ids)
        self._include_stop = include_stop_in_output
        self.is_finished = False

    def feed(self, output: TokenOutput) -> ChoiceDelta:
        """Take one output of the worker (without error)."""
        assert not self.is_finished
        token_ids = output.token_ids
        shown = token_ids
        ended_by_token = output.finish_reason == "stop" and token_ids and token_ids[-1] in self._end_token_ids
        if ended_by_token and not self._include_stop:
            shown = token_ids[:-1]  # the token counts, its text is not part of the answer
        delta = self._output_text.push(shown)
        text = delta.text
        if delta.stop is not None:
            self.is_finished = True
            kept = delta.num_tokens_kept
            return ChoiceDelta(
                text=text,
                num_tokens=kept,
                logprobs=tuple((output.logprobs or ())[:kept]),
                finish_reason="stop",
                stop_reason=delta.stop,
                is_stop_string=output.finish_reason is None,
            )
        finish_reason: str | None = output.finish_reason
        stop_reason: int | str | None = None
        if finish_reason is not None:
            self.is_finished = True
            rest = self._output_text.finish()  # what was held back may still complete a stop string
            text += rest.text
            if rest.stop is not None:
                finish_reason, stop_reason = "stop", rest.stop
            elif output.stop_reason is not None and output.stop_reason not in self._eos_token_ids:
                stop_reason = output.stop_reason
        return ChoiceDelta(
            text=text,
            num_tokens=len(token_ids),
            logprobs=tuple(output.logprobs or ()),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
