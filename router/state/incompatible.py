"""Which workers of a cluster cannot work together, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from cluster.members import (
    WorkerRecord,
    compatibility_key,
    incompatibility,
    takes_prefills,
    takes_requests,
)


@dataclass(frozen=True)
class Incompatible:
    """Workers that cannot work together, or one that cannot work with this router, and why."""

    workers: tuple[str, ...]
    reason: str


def incompatible_groups(records: Iterable[WorkerRecord]) -> list[Incompatible]:
    """Pairs of groups of workers of one model that cannot hand over to each other, but would have to.

    A group is what is compatible among itself; the reason names its first worker. So the work grows with the
    workers and the pairs of groups, not with the pairs of workers.
    """
    groups: dict[tuple[str, object], list[WorkerRecord]] = {}
    for record in records:
        groups.setdefault((record.model.name, compatibility_key(record)), []).append(record)
    found: list[Incompatible] = []
    for ((one_model, _), one), ((other_model, _), other) in combinations(groups.items(), 2):
        if one_model != other_model:
            continue
        for decode, prefill in ((one, other), (other, one)):
            decoding = [record for record in decode if takes_requests(record.role)]
            prefilling = [record for record in prefill if takes_prefills(record.role)]
            if decoding and prefilling:
                reason = incompatibility(decoding[0], prefilling[0])
                assert reason is not None
                workers = (*(record.id for record in decoding), *(record.id for record in prefilling))
                found.append(Incompatible(workers, reason))
                break  # two groups that take both: said once
    return found
