"""In which order prompts get their share of a step's token budget."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCandidate:
    """A prompt with tokens left to compute: one that waits, or one already started."""

    arrival_index: int  # 0 for the engine's first request, then 1, 2, ...
    num_remaining_tokens: int  # neither computed nor, as far as is known, in the prefix cache
    waited_s: float  # seconds since arrival
    ageing_tokens_per_second: float


def fcfs(candidate: PrefillCandidate) -> tuple[float, int]:
    """First come, first served."""
    return (0.0, candidate.arrival_index)


def shortest_remaining(candidate: PrefillCandidate) -> tuple[float, int]:
    """Shortest remaining work first, with ageing.

    Each second of waiting counts like ``ageing_tokens_per_second`` tokens less to compute. A prompt of n
    tokens is therefore overtaken only by prompts that arrive within the next
    n / ageing_tokens_per_second seconds.
    """
    aged = candidate.num_remaining_tokens - candidate.ageing_tokens_per_second * candidate.waited_s
    return (aged, candidate.arrival_index)


# The candidate with the smallest key goes first. Keys must be unique, hence the arrival index at the end.
PREFILL_POLICIES = MappingProxyType({"fcfs": fcfs, "shortest_remaining": shortest_remaining})
