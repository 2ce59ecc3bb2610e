"""Token accounting of one API request, as OpenAI reports it."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.messages import RequestTimings


class UsageCounter:
    """Counts each prompt once, however many choices it has, and every token of every choice.

    A prompt's cached tokens are those that nobody computed for this request. Where several choices share a
    prompt, later ones find in the cache what the first computed, so the smallest hit counts.
    """

    def __init__(self, prompt_lengths: list[int], n: int) -> None:
        self._prompt_lengths = prompt_lengths
        self._n = n
        self._completion_tokens = [0] * (len(prompt_lengths) * n)
        self._cached: dict[int, int] = {}  # by prompt
        self._timings: RequestTimings | None = None  # of the first choice that got a token

    def first_token(self, choice: int, timings: RequestTimings) -> None:
        """Note where the prompt of ``choice`` came from."""
        if self._timings is None:
            self._timings = timings
        prompt = choice // self._n
        cached = timings.num_prefill_cached_tokens + timings.num_decode_cached_tokens
        self._cached[prompt] = min(cached, self._cached.get(prompt, cached))

    def add(self, choice: int, num_tokens: int) -> None:
        """Count tokens that belong to the answer."""
        self._completion_tokens[choice] += num_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompt_lengths)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody computed for this request."""
        return sum(self._cached.values())

    def body(self) -> dict[str, Any]:
        """The ``usage`` object so far: OpenAI's members and no others, because clients add them up."""
        completion_tokens = sum(self._completion_tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def explanation(self) -> dict[str, Any]:
        """The ``leadout`` object: where the time of the first choice with a token went until that."""
        return {"timings": None if self._timings is None else msgspec.structs.asdict(self._timings)}
