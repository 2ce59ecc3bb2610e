"""What a scheduler decides, and what it makes of a step's result."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Batch
from engine.sequence import Sequence
from engine.step_result import PrefillProgress, Reservation, SequenceOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's decision. ``sequences[i]`` is the one that ``batch.sequences[i]`` computes a part of."""

    batch: Batch
    sequences: tuple[Sequence, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    first_scheduled: tuple[str, ...] = ()  # request ids computed for the first time
    preempted: tuple[str, ...] = ()  # request ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerUpdate:
    """What a computed step means for its requests."""

    outputs: tuple[SequenceOutput, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
