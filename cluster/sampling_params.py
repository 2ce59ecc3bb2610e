"""How one request's tokens are to be chosen. Travels from the router to whichever worker samples."""

from __future__ import annotations

import msgspec

# What a request may ask for. Beyond these bounds a parameter would not choose tokens any more but overflow
# the logits: a repetition penalty of 0.01 turns a logit of 50 into 5,000, which is certainty already.
MAX_TEMPERATURE = 2.0
GREEDY_BELOW_TEMPERATURE = 1e-5  # a logit divided by less says nothing but which one is the largest
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0  # of frequency and presence, in both directions
MAX_LOGIT_BIAS = 100.0  # in both directions


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one sequence, already validated by the router.

    ``seed`` is always set: the router draws one where the caller gave none, so that another worker can
    continue the same random stream. Stop *strings* are not here: the router applies them to text.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0  # below GREEDY_BELOW_TEMPERATURE: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 0: greedy
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output only, as OpenAI defines it
    presence_penalty: float = 0.0  # over output only
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely ones'

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_p == 0
