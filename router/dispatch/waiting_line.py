"""Which requests have places and which wait for them. Pure: no clock, no I/O."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


class LineFullError(Exception):
    """There is neither a place nor room to wait for one."""

    def __init__(self, max_sequences: int, max_waiting: int) -> None:
        self.max_sequences = max_sequences
        super().__init__(
            f"this router serves at most {max_sequences} sequences at a time, and {max_waiting} requests wait"
        )


class NeverFitsError(Exception):
    """The request alone asks for more places than there are."""

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        super().__init__(f"at most {max_sequences} sequences are served at a time")


@dataclass(frozen=True, eq=False, kw_only=True)
class Ticket:
    """A request's claim to places, one for each of its sequences: it gets all of them or none."""

    num_sequences: int
    priority: int = 0  # smaller ones first, as in vLLM


@dataclass(frozen=True, order=True)
class _Waiting:
    priority: int
    number: int  # of equal priority, whoever came first
    ticket: Ticket = field(compare=False)


class WaitingLine:
    """A bounded number of places, and a bounded line before them.

    The order is strict: nobody passes the first in line, even where only its own sequences do not fit, so
    that a request with many of them gets its turn. Less urgent ones may wait for ever: whoever waits must
    know when to ``leave``.
    """

    def __init__(self, max_sequences: int, max_waiting: int) -> None:
        if max_sequences < 1 or max_waiting < 0:
            raise ValueError(
                f"max_sequences is {max_sequences}, must be at least 1; max_waiting {max_waiting}, at least 0"
            )
        self.max_sequences = max_sequences
        self.max_waiting = max_waiting
        self.num_admitted = 0  # sequences
        self._admitted: set[Ticket] = set()
        self._waiting: list[_Waiting] = []
        self._num_joined = 0

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    def join(self, ticket: Ticket) -> bool:
        """True: it has its places now; False: it waits. Raises LineFullError and NeverFitsError."""
        if ticket.num_sequences > self.max_sequences:
            raise NeverFitsError(self.max_sequences)
        self._num_joined += 1
        waiting = _Waiting(ticket.priority, self._num_joined, ticket)
        bisect.insort(self._waiting, waiting)
        if ticket in self._advance():
            return True
        if len(self._waiting) > self.max_waiting:
            self._waiting.remove(waiting)
            raise LineFullError(self.max_sequences, self.max_waiting)
        return False

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Give up its places, or its place in line. Returns who has places now. Harmless if it has left."""
        if ticket in self._admitted:
            self._admitted.remove(ticket)
            self.num_admitted -= ticket.num_sequences
        else:
            self._waiting = [waiting for waiting in self._waiting if waiting.ticket is not ticket]
        return self._advance()

    def _advance(self) -> list[Ticket]:
        admitted: list[Ticket] = []
        while self._waiting:
            ticket = self._waiting[0].ticket
            if self.num_admitted + ticket.num_sequences > self.max_sequences:
                break
            del self._waiting[0]
            self._admitted.add(ticket)
            self.num_admitted += ticket.num_sequences
            admitted.append(ticket)
        return admitted
