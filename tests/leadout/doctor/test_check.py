"""Running checks: names, and what becomes of one that raises or hangs."""

from __future__ import annotations

import threading

from leadout.doctor.check import Check, Finding, run_check


def test_findings_come_under_the_name_of_their_check() -> None:
    found = [Finding("ok", "fine"), Finding("warning", "so so", "mend it", {"x": 1}, about="part")]
    first, second = run_check(Check("thing", lambda: found))
    assert (first.name, first.status, first.remedy) == ("thing", "ok", "")
    assert second.as_dict() == {
        "name": "thing:part",
        "status": "warning",
        "seen": "so so",
        "remedy": "mend it",
        "data": {"x": 1},
    }


def test_a_check_that_raises_has_failed_with_its_error_in_one_line() -> None:
    def look() -> Finding:
        raise KeyError("a\nb")

    (result,) = run_check(Check("thing", look))
    assert result.status == "failed"
    assert "KeyError: 'a\\nb'" in result.seen
    assert "\n" not in result.seen
    assert result.remedy


def test_a_check_that_hangs_has_failed_and_does_not_hold_up_the_others() -> None:
    forever = threading.Event()

    def look() -> Finding:
        forever.wait()
        return Finding("ok", "never seen")

    (result,) = run_check(Check("thing", look, timeout_s=0.05))
    forever.set()
    assert (result.status, result.data) == ("failed", {"timed_out": True})
