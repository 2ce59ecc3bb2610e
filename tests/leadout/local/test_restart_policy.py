"""When a dead process is started again."""

from __future__ import annotations

from leadout.local.restart_policy import MAX_DELAY_S, GiveUp, Restart, RestartPolicy


def test_the_delay_doubles_with_each_death() -> None:
    policy = RestartPolicy()
    decisions = [policy.died(now, now - 1) for now in (0, 100, 200, 300, 400)]
    assert decisions == [Restart(0.5), Restart(1), Restart(2), Restart(4), Restart(8)]


def test_the_delay_has_an_upper_bound() -> None:
    policy = RestartPolicy()
    delays = [policy.died(now, now - 1) for now in range(0, 1000, 100)]
    assert delays[-1] == Restart(MAX_DELAY_S)


def test_a_minute_of_being_ready_starts_over() -> None:
    policy = RestartPolicy()
    policy.died(0, -1)
    assert policy.died(100, 99) == Restart(1)
    assert policy.died(200, 140.5) == Restart(2)  # was ready 59.5 s
    assert policy.died(300, 240) == Restart(0.5)  # was ready 60 s


def test_five_deaths_within_a_minute_end_it() -> None:
    policy = RestartPolicy()
    for now in (0, 15, 30, 45):
        assert isinstance(policy.died(now, now - 1), Restart)
    assert policy.died(60, 59) == GiveUp("it died 5 times within 60 s")


def test_five_deaths_over_more_than_a_minute_do_not() -> None:
    policy = RestartPolicy()
    for now in (0, 15, 30, 45):
        policy.died(now, now - 1)
    assert isinstance(policy.died(60.1, 59), Restart)
    assert isinstance(policy.died(75, 74), GiveUp)  # the last five, from 15 on, lie within 60 s


def test_five_deaths_in_a_row_before_it_was_ready_end_it() -> None:
    policy = RestartPolicy()
    for now in (0, 1000, 2000, 3000):
        assert isinstance(policy.died(now, None), Restart)
    assert policy.died(4000, None) == GiveUp("it died 5 times in a row before it was ready")


def test_being_ready_once_forgets_the_failed_starts() -> None:
    policy = RestartPolicy()
    for now in (0, 1000, 2000, 3000):
        policy.died(now, None)
    assert isinstance(policy.died(4000, 3999), Restart)
    assert isinstance(policy.died(5000, None), Restart)
