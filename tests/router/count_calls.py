"""Count what a function does, where timing it would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def number_of_calls(function: Callable[[], object]) -> int:
    """Calls of Python functions and into compiled code while ``function`` runs."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
