"""Finds stop strings in streamed text and holds back only what may be the start of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    """``text`` may go to the client; ``matched`` is the stop string that ended the text, or None."""

    text: str
    matched: str | None = None


class StopStrings:
    """The stop strings of one request and their Knuth-Morris-Pratt automata, shared by all its sequences.

    Immutable, and safe to use in several threads and processes. Costs time and memory in proportion to the
    strings' length.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Raises ValueError for an empty stop string."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty; it must have at least one character")
        self.stops = tuple(stops)
        self.borders = tuple(map(_borders, self.stops))


class StopStringMatcher:
    """Searches one sequence's text for stop strings, in pieces of any size.

    The match that is complete first wins; of several that are complete at the same character, the first in
    the list. What is held back is the longest end of the text that is a proper prefix of a stop string,
    nothing more. Every character is looked at once per stop string, whatever was held back.
    """

    def __init__(self, stop_strings: StopStrings, *, include_stop: bool = False) -> None:
        """With ``include_stop`` the text ends with the stop string, else before it."""
        self._stops = stop_strings.stops
        self._borders = stop_strings.borders
        self._include_stop = include_stop
        self._lengths = [0] * len(self._stops)  # per stop string: how much of it the text's end already is
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None so far."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Adds ``text``. After a match the sequence is over: more text is dropped and the match is
        repeated.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._stops:
            return StopResult(text)
        pending = self._held + text
        searched = len(self._held)
        for position, character in enumerate(text, start=searched):
            found = self._advance(character)
            if found is not None:
                end = position + 1 if self._include_stop else position + 1 - len(found)
                self._held = ""
                self._matched = found
                return StopResult(pending[:end], found)
        certain = len(pending) - max(self._lengths)
        self._held = pending[certain:]
        return StopResult(pending[:certain])

    def _advance(self, character: str) -> str | None:
        """Moves every automaton on by one character; returns the first stop string that is now complete."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                found = found if found is not None else stop
                length = 0  # the match ends the text, so the automaton is not used again
            self._lengths[index] = length
        return found

    def finish(self) -> StopResult:
        """The end of the text: what was held back was no stop string and is returned."""
        held, self._held = self._held, ""
        return StopResult(held, self._matched)


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix of ``stop``, the length of the longest proper prefix of it that is also its end."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
