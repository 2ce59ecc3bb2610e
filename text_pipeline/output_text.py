"""One sequence's output: from token ids to the text a client gets, ended by a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from text_pipeline.detokenizer import IncrementalDetokenizer
from text_pipeline.stop_strings import StopStringMatcher, StopStrings
from text_pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """New text of a sequence.

    ``stop`` is the stop string that ended it, or None. ``num_tokens_kept`` counts the tokens of this call
    that belong to the output, the one that completed the stop string included; tokens after it were
    dropped.
    """

    text: str
    stop: str | None = None
    num_tokens_kept: int = 0


class OutputText:
    """Detokenizes one sequence and applies its stop strings, one token at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Stop strings are searched in the text from token number ``min_tokens`` on."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._matcher = StopStringMatcher(stop_strings or StopStrings(), include_stop=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """All tokens kept so far: what usage counts."""
        return self._num_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matcher.matched

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Adds generated tokens; once a stop string was found, all further ones are dropped."""
        texts: list[str] = []
        kept = 0
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            kept += 1
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if text:
                texts.append(self._through_matcher(text))
        return TextDelta("".join(texts), self._matcher.matched, kept)

    def finish(self) -> TextDelta:
        """The end of the tokens: returns all that was still held back."""
        if self._matcher.matched is not None:
            return TextDelta("", self._matcher.matched)
        text = self._through_matcher(self._detokenizer.finish())
        return TextDelta(text + self._matcher.finish().text, self._matcher.matched)

    def _through_matcher(self, text: str) -> str:
        if self._num_tokens < self._min_tokens:
            return text
        return self._matcher.push(text).text
