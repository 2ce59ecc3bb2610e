"""Which running sequence gives up its blocks when another one must grow."""

from __future__ import annotations

from collections.abc import Iterable

from engine.sequence import Sequence


def choose_victim(running: Iterable[Sequence], growing: Sequence) -> Sequence | None:
    """The youngest of ``running``, perhaps ``growing`` itself; None if ``growing`` had better wait.

    Blocks of ``prefill_only`` sequences may be on their way to a peer: they stay. A sequence in a step in
    flight keeps its blocks till that is over, and ``growing`` is not given up while others may be instead.
    """
    preemptible = [sequence for sequence in running if not sequence.prefill_only]
    idle = [sequence for sequence in preemptible if not sequence.num_in_flight_tokens]
    victim = max(idle, key=lambda sequence: sequence.arrival_index)
    return None if victim is growing and len(idle) < len(preemptible) else victim
