"""What is remembered, and what is forgotten."""

from __future__ import annotations

import pytest

from cluster.recent_keys import RecentKeys


def test_the_oldest_is_forgotten_first_and_adding_again_renews() -> None:
    keys: RecentKeys[str] = RecentKeys(max_size=2)
    keys.add("a")
    keys.add("b")
    keys.add("a")
    keys.add("c")
    assert "a" in keys
    assert "b" not in keys
    assert "c" in keys
    assert len(keys) == 2


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_size is 0"):
        RecentKeys(max_size=0)
