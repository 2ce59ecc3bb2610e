"""Step samples: the newest ones, and how many there were."""

from __future__ import annotations

import pytest

from cluster.load import StepSample
from engine.batch import Batch, ScheduledSequence
from engine.step_history import StepHistory


def batch(*parts: tuple[int, int]) -> Batch:
    """Sequences that compute so many tokens after so many computed ones."""
    return Batch(
        tuple(
            ScheduledSequence(f"r{number}", [7] * count, start, [1], num_logits=1)
            for number, (start, count) in enumerate(parts)
        )
    )


def test_a_sample_says_what_was_computed() -> None:
    history = StepHistory()
    history.add(batch((0, 5), (40, 1)), 12.5)
    load = history.load(prompt_tokens_total=5, generation_tokens_total=1)
    assert load.recent == (StepSample(6, 46, 2, 12.5),)
    assert (load.steps_total, load.average_ms) == (1, 12.5)
    assert (load.prompt_tokens_total, load.generation_tokens_total) == (5, 1)


def test_the_newest_samples_are_kept_in_order() -> None:
    history = StepHistory()
    for number in range(100):
        history.add(batch((number, 1)), float(number))
    load = history.load(prompt_tokens_total=0, generation_tokens_total=0)
    assert load.steps_total == 100
    durations = [sample.duration_ms for sample in load.recent]
    assert durations == [float(number) for number in range(100 - len(durations), 100)]
    assert len(durations) < 100


def test_the_average_follows_the_newest_steps() -> None:
    history = StepHistory()
    history.add(batch((0, 1)), 0.0)
    history.add(batch((1, 1)), 100.0)
    assert history.load(prompt_tokens_total=0, generation_tokens_total=0).average_ms == pytest.approx(10.0)
