"""Places and the line before them, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.dispatch.waiting_line import LineFullError, NeverFitsError, Ticket, WaitingLine

MAX_SEQUENCES, MAX_WAITING = 6, 4


class Line(RuleBasedStateMachine):
    """Requests come and go in any order; nobody passes anybody who is ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(MAX_SEQUENCES, MAX_WAITING)
        self.served: list[Ticket] = []
        self.waiting: list[Ticket] = []  # in the order in which they came

    @property
    def first(self) -> Ticket | None:
        return min(self.waiting, key=lambda ticket: ticket.priority, default=None)

    @rule(num_sequences=st.integers(1, MAX_SEQUENCES), priority=st.integers(-1, 1))
    def join(self, num_sequences: int, priority: int) -> None:
        ticket = Ticket(num_sequences=num_sequences, priority=priority)
        is_full = len(self.waiting) == MAX_WAITING
        is_ahead = all(priority < other.priority for other in self.waiting)
        fits = is_ahead and self.free >= num_sequences
        try:
            has_places = self.line.join(ticket)
        except LineFullError:
            assert is_full
            assert not fits
            return
        assert has_places == fits
        (self.served if has_places else self.waiting).append(ticket)

    @precondition(lambda self: self.served or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([*self.served, *self.waiting]))
        (self.served if ticket in self.served else self.waiting).remove(ticket)
        admitted = self.line.leave(ticket)
        for other in admitted:
            assert other is self.first
            self.waiting.remove(other)
            self.served.append(other)
        assert self.line.leave(ticket) == [], "it has left"

    @property
    def free(self) -> int:
        return MAX_SEQUENCES - sum(ticket.num_sequences for ticket in self.served)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert self.line.num_admitted == MAX_SEQUENCES - self.free <= MAX_SEQUENCES
        assert self.line.num_waiting == len(self.waiting) <= MAX_WAITING
        first = self.first
        assert first is None or first.num_sequences > self.free


TestLine = Line.TestCase


def test_a_request_that_is_larger_than_the_house() -> None:
    line = WaitingLine(2, 5)
    with pytest.raises(NeverFitsError, match="at most 2 sequences"):
        line.join(Ticket(num_sequences=3))
    assert (line.num_admitted, line.num_waiting) == (0, 0)


def test_a_full_line_says_so() -> None:
    line = WaitingLine(1, 0)
    assert line.join(Ticket(num_sequences=1))
    with pytest.raises(LineFullError, match="at most 1 sequences at a time, and 0 requests wait"):
        line.join(Ticket(num_sequences=1))


@pytest.mark.parametrize("bounds", [(0, 1), (1, -1)])
def test_bounds_that_make_no_sense(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        WaitingLine(*bounds)
