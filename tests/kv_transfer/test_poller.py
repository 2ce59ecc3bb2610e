"""The poller runs commands and polls on one thread, sleeps in between, and ends in a defined way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from kv_transfer.poller import Poller, polling_sleep_s

ROOT = Path(__file__).parent.parent.parent


class Recorder:
    """A poller whose polls, stop and crash are recorded. It sleeps until a command comes."""

    def __init__(self, *, fail_poll: bool = False) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.num_polls = 0
        self.has_crashed = threading.Event()
        self.fail_poll = fail_poll
        self.poller = Poller("test", poll=self.poll, on_stop=self.stopped, on_crash=self.crashed)
        self.poller.start()

    def poll(self) -> float | None:
        self.threads.add(threading.get_ident())
        self.num_polls += 1
        if self.fail_poll:
            raise RuntimeError("a bug")
        return None

    def stopped(self) -> None:
        self.threads.add(threading.get_ident())
        self.events.append("stopped")

    def crashed(self, error: BaseException) -> None:
        self.threads.add(threading.get_ident())
        self.events.append(f"crashed: {error}")
        self.has_crashed.set()


def test_commands_run_in_order_on_one_thread_and_before_the_end() -> None:
    recorder = Recorder()
    for number in range(100):
        assert recorder.poller.submit(lambda number=number: recorder.events.append(str(number)))
    recorder.poller.stop()
    assert recorder.events == [*map(str, range(100)), "stopped"]
    assert len(recorder.threads) == 1
    assert threading.get_ident() not in recorder.threads
    assert not recorder.poller.submit(lambda: None), "too late"
    recorder.poller.stop()
    assert recorder.events[-1] == "stopped", "stopped once"
    assert recorder.events.count("stopped") == 1


def test_a_sleeping_poller_does_not_poll() -> None:
    recorder = Recorder()
    ran = threading.Event()
    recorder.poller.submit(ran.set)
    assert ran.wait(20)
    recorder.poller.stop()
    assert recorder.num_polls <= 2, "once at the start, once after the command"


def test_an_error_in_a_command_stops_the_poller_and_later_commands_still_run() -> None:
    recorder = Recorder()
    hold = threading.Event()

    def fail() -> None:
        raise RuntimeError("a bug")

    recorder.poller.submit(lambda: hold.wait(20) and None)
    recorder.poller.submit(fail)
    recorder.poller.submit(lambda: recorder.events.append("later"))
    hold.set()
    recorder.poller.stop()
    assert recorder.events == ["crashed: a bug", "later", "stopped"]
    assert len(recorder.threads) == 1


def test_an_error_in_poll_stops_the_poller() -> None:
    recorder = Recorder(fail_poll=True)
    assert recorder.has_crashed.wait(20)
    recorder.poller.stop()
    assert recorder.events == ["crashed: a bug", "stopped"]
    assert not recorder.poller.submit(lambda: None)


def test_a_process_that_forgets_to_stop_it_ends_in_order() -> None:
    program = (
        "from kv_transfer.poller import Poller\n"
        "p = Poller('p', poll=lambda: 0.001, on_stop=lambda: print('stopped'), on_crash=print)\n"
        "p.start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "stopped\n"


def test_sleeps_grow_with_the_time_since_something_happened() -> None:
    sleeps = [polling_sleep_s(idle_s, 0.1) for idle_s in (0.0, 0.001, 0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert sleeps == sorted(sleeps)
    assert 0 < sleeps[0] <= 0.001
    assert sleeps[-1] == 0.1
    for idle_s in (0.01, 0.1, 1.0):
        assert polling_sleep_s(idle_s, 10.0) <= idle_s / 10, "it must not add much to what was waited"
