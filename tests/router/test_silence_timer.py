"""When a silent stream is to be given a sign, on a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.clock import ManualClock
from router.api.response.silence_timer import SilenceTimer
from tests.router.dispatch_bench import ManualTimers


class Bench:
    def __init__(self, interval_s: float) -> None:
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.began = self.clock.unix()
        self.calls: list[float] = []
        self.silence = SilenceTimer(interval_s, self._call, clock=self.clock, timer=self.timers)

    def _call(self) -> None:
        self.calls.append(self.clock.unix() - self.began)


def test_silence_is_noticed_again_and_again() -> None:
    bench = Bench(10)
    bench.timers.advance(35)
    assert bench.calls == [10, 20, 30]


def test_the_interval_counts_from_what_was_sent_last() -> None:
    bench = Bench(10)
    for _ in range(5):
        bench.timers.advance(8)
        bench.silence.restart()
    assert bench.calls == []
    bench.timers.advance(9.5)
    assert bench.calls == []
    bench.timers.advance(0.5)
    assert bench.calls == [50]


def test_an_interval_of_zero_is_never() -> None:
    bench = Bench(0)
    assert len(bench.timers) == 0
    bench.silence.restart()
    bench.timers.advance(1e6)
    assert bench.calls == []


def test_after_closing_nothing_is_left() -> None:
    bench = Bench(10)
    bench.timers.advance(15)
    bench.silence.close()
    bench.silence.close()
    assert len(bench.timers) == 0
    bench.timers.advance(100)
    assert bench.calls == [10]


def test_it_may_be_closed_by_what_it_calls() -> None:
    clock = ManualClock()
    timers = ManualTimers(clock)
    silence = SilenceTimer(10, lambda: silence.close(), clock=clock, timer=timers)
    timers.advance(10)
    assert len(timers) == 0


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 15))
def test_each_whole_interval_of_silence_is_one_call(gaps: list[int], interval: int) -> None:
    """Whatever the times of sending: a call for each interval that passes after the last of them."""
    bench = Bench(interval)
    expected: list[int] = []
    now = 0
    for gap in gaps:
        expected += [now + passed for passed in range(interval, gap + 1, interval)]
        bench.timers.advance(gap)
        now += gap
        bench.silence.restart()
        assert len(bench.timers) == 1
    assert bench.calls == expected
