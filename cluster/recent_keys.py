"""Remembers what is over, for a while: so that a message that comes late or twice does not start it again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class RecentKeys(Generic[_Key]):
    """The last ``max_size`` keys added; the oldest are forgotten first."""

    def __init__(self, max_size: int = 20_000) -> None:
        if max_size < 1:
            raise ValueError(f"max_size is {max_size}, must be at least 1")
        self._max_size = max_size
        self._keys: dict[_Key, None] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: _Key) -> None:
        """Remember ``key`` as the newest."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._max_size:
            del self._keys[next(iter(self._keys))]
