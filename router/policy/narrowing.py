"""Workers in question, narrowed down step by step, with the reasons of those that were passed over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from router.state.columns import Column, Slots

Reason = Callable[[int], str]  # of a slot


class Narrowing:
    """The slots that are left, in their order. Reasons are put into words only when somebody asks."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._dropped: list[tuple[Slots, Reason]] = []

    def keep(self, keeps: NDArray[np.bool_], reason: Reason) -> None:
        """Go on with those for which ``keeps`` (``[number of slots left]``); the others go for ``reason``."""
        if not keeps.all():
            self._dropped.append((self.slots[~keeps], reason))
            self.slots = self.slots[keeps]

    def reasons(self) -> dict[int, str]:
        """Why each slot that was dropped was."""
        return {int(slot): reason(int(slot)) for slots, reason in self._dropped for slot in slots}


def first_lowest(slots: Slots, *columns: Column) -> int:
    """The slot with the lowest value in the first column, of equals in the next, then the first of them."""
    for column in columns:
        if len(slots) == 1:
            break
        values = column[slots]
        slots = slots[values == values.min()]
    return int(slots[0])
