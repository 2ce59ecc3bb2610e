"""How long an engine's steps took, and what they computed."""

from __future__ import annotations

from collections import deque

from cluster.load import StepLoad, StepSample
from engine.batch import Batch

_NUM_SAMPLES = 32  # in a load report
_AVERAGE_WEIGHT = 0.1  # of the newest step in the moving average


class StepHistory:
    """The newest steps and the averages over all."""

    def __init__(self) -> None:
        self._recent: deque[StepSample] = deque(maxlen=_NUM_SAMPLES)
        self._num_steps = 0
        self._average_ms = 0.0

    def add(self, batch: Batch, duration_ms: float) -> None:
        """Counts a step that computed ``batch``."""
        weight = _AVERAGE_WEIGHT if self._num_steps else 1.0
        self._average_ms += weight * (duration_ms - self._average_ms)
        self._num_steps += 1
        self._recent.append(
            StepSample(
                num_tokens=batch.num_tokens,
                num_context_tokens=batch.num_context_tokens,
                num_sequences=len(batch.sequences),
                duration_ms=duration_ms,
            )
        )

    def load(self, *, prompt_tokens_total: int, generation_tokens_total: int) -> StepLoad:
        """What a worker reports of its steps."""
        return StepLoad(
            steps_total=self._num_steps,
            average_ms=self._average_ms,
            prompt_tokens_total=prompt_tokens_total,
            generation_tokens_total=generation_tokens_total,
            recent=tuple(self._recent),
        )
