"""Lasting problems in the log: said once, then rarely, and once when they are over."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.clock import ManualClock
from cluster.problem_log import FIRST_INTERVAL_S, ProblemLog


class Lines(logging.Handler):
    """A logger that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.logger = logging.Logger("test")
        self.logger.addHandler(self)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


class Fixture:
    def __init__(self) -> None:
        self.lines = Lines()
        self.clock = ManualClock()
        self.log = ProblemLog(self.lines.logger, self.clock)


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_a_lasting_problem_is_said_once_then_ever_more_rarely_and_when_it_is_over(fixture: Fixture) -> None:
    said_at = []
    for second in range(3600):
        fixture.log.report("registry", "no answer from %s", "there")
        if len(fixture.lines.texts) > len(said_at):
            said_at.append(second)
        fixture.clock.advance(1)
    assert said_at == [0, 10, 30, 70, 150, 310, 630, 1230, 1830, 2430, 3030]
    assert fixture.lines.texts[:3] == [
        "no answer from there",
        "no answer from there (9 more in 10 s)",
        "no answer from there (19 more in 20 s)",
    ]
    fixture.log.over("registry", "%s answers again", "it")
    fixture.log.over("registry", "%s answers again", "it")
    assert fixture.lines.texts[len(said_at) :] == ["it answers again (3600 reports in 3600 s)"]


def test_a_problem_that_never_was_is_not_over(fixture: Fixture) -> None:
    fixture.log.over("registry", "all is well")
    assert fixture.lines.texts == []


def test_problems_are_told_apart_by_their_keys(fixture: Fixture) -> None:
    for _ in range(3):
        for name in ("one", "other"):
            fixture.log.report(("peer", name), "%s is odd", name)
    assert fixture.lines.texts == ["one is odd", "other is odd"]


def test_a_problem_that_comes_and_goes_is_said_as_rarely(fixture: Fixture) -> None:
    for _ in range(36_000):
        fixture.log.report("link", "broken")
        fixture.clock.advance(0.05)
        fixture.log.over("link", "whole")
        fixture.clock.advance(0.05)
    texts = fixture.lines.texts  # of an hour
    assert [text.split()[0] for text in texts] == ["broken", "whole"] * 11


def test_after_a_quiet_interval_it_is_a_new_problem(fixture: Fixture) -> None:
    fixture.log.report("link", "broken")
    fixture.log.over("link", "whole")
    fixture.clock.advance(FIRST_INTERVAL_S)
    fixture.log.report("link", "broken")
    fixture.log.report("link", "broken")
    fixture.clock.advance(FIRST_INTERVAL_S)
    fixture.log.report("link", "broken")
    assert fixture.lines.texts == ["broken", "whole (1 reports in 0 s)", "broken", "broken (1 more in 10 s)"]


def test_level_and_traceback_are_those_of_the_report_that_is_said(fixture: Fixture) -> None:
    error = ValueError("why")
    fixture.log.report("x", "failed", level=logging.ERROR, error=error)
    (record,) = fixture.lines.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_what_is_remembered_is_bounded(fixture: Fixture) -> None:
    for number in range(5_000):
        fixture.log.report(number, "odd")
        fixture.log.report("always", "heard of")
    assert len(fixture.log._problems) == 1_000
    assert fixture.lines.texts.count("heard of") == 1


@given(
    st.lists(st.tuples(st.sampled_from(["report", "over"]), st.floats(0, 30)), max_size=200),
)
def test_lines_of_one_problem_never_come_close(steps: list[tuple[str, float]]) -> None:
    """At most one line of its existence and one of its end in each interval, whatever happens."""
    fixture = Fixture()
    elapsed = 0.0
    for what, pause in steps:
        if what == "report":
            fixture.log.report("x", "broken")
        else:
            fixture.log.over("x", "whole")
        fixture.clock.advance(pause)
        elapsed += pause
    assert len(fixture.lines.texts) <= 2 * (1 + elapsed // FIRST_INTERVAL_S)
    assert sum(text.startswith("broken") for text in fixture.lines.texts) <= 1 + elapsed // FIRST_INTERVAL_S
