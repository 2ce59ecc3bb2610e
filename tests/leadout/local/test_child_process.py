"""Tiny real child processes: their output, their ends, and who takes them along."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from leadout.local.child_process import ChildProcess, ChildSpec, describe_exit

_HANG_S = 60  # only so that a broken test ends


class _Children:
    """Starts children and keeps their lines."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "child.log"
        self.lines: list[str] = []
        self._started: list[ChildProcess] = []

    def start(self, code: str, **environment: str) -> ChildProcess:
        spec = ChildSpec("child", "decode", [sys.executable, "-c", textwrap.dedent(code)], environment)
        child = ChildProcess(spec, self.log, self.lines.append)
        self._started.append(child)
        return child

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_HANG_S):
            while not holds():  # noqa: ASYNC110 — processes set no event
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for child in self._started:
            child.send_signal(signal.SIGKILL)
            await child.wait()


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[_Children]:
    started = _Children(tmp_path)
    yield started
    await started.close()


async def _end(child: ChildProcess) -> int:
    async with asyncio.timeout(_HANG_S):
        return await child.wait()


async def test_both_outputs_go_line_by_line_to_the_log_and_the_listener(children: _Children) -> None:
    child = children.start("import os\nos.write(1, b'one\\ntwo\\r\\n')\nos.write(2, b'three\\n\\nlast')")
    assert await _end(child) == 0
    assert children.lines == ["one", "two", "three", "", "last"]
    assert list(child.tail) == children.lines
    assert children.log.read_bytes() == b"one\ntwo\r\nthree\n\nlast"


async def test_lines_arrive_while_the_process_runs(children: _Children) -> None:
    child = children.start("print('ready', flush=True)\nimport time\ntime.sleep(60)")
    await children.until(lambda: children.lines == ["ready"])
    assert child.is_running


async def test_a_long_line_is_passed_on_in_pieces_and_logged_whole(children: _Children) -> None:
    size = 300_000
    assert await _end(children.start(f"print('x' * {size})\nprint('after')")) == 0
    *pieces, after = children.lines
    assert len(pieces) > 1
    assert "".join(pieces) == "x" * size
    assert after == "after"
    assert children.log.read_text() == "x" * size + "\nafter\n"


async def test_all_output_of_a_flood_arrives(children: _Children) -> None:
    child = children.start("for number in range(50_000): print(f'line {number:05}')")
    assert await _end(child) == 0
    assert children.lines == [f"line {number:05}" for number in range(50_000)]
    assert list(child.tail) == children.lines[-40:]


async def test_bytes_that_are_no_text_are_replaced(children: _Children) -> None:
    await _end(children.start("import os\nos.write(1, b'a\\xffb\\n')"))
    assert children.lines == ["a\ufffdb"]


async def test_a_later_process_appends_to_the_log(children: _Children) -> None:
    await _end(children.start("print('first')"))
    await _end(children.start("print('second')"))
    assert children.log.read_text() == "first\nsecond\n"


async def test_the_child_has_the_given_environment_only(children: _Children) -> None:
    child = children.start("import os\nprint(os.environ.get('GIVEN'), os.environ.get('HOME'))", GIVEN="yes")
    assert await _end(child) == 0
    assert children.lines == ["yes None"]


async def test_exit_statuses(children: _Children) -> None:
    assert await _end(children.start("raise SystemExit(3)")) == 3
    assert await _end(children.start("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)")) == -6


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-100, "was killed by signal 100"),
    ],
)
def test_exit_statuses_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text


async def test_a_child_can_end_in_its_own_way_at_sigterm(children: _Children) -> None:
    child = children.start(
        """
        import os, signal, time
        def end(*_):
            os.write(1, b"ending\\n")  # not print, in which the signal may come
            os._exit(7)
        signal.signal(signal.SIGTERM, end)
        os.write(1, b"ready\\n")
        while True: time.sleep(60)
        """
    )
    await children.until(lambda: "ready" in children.lines)
    child.send_signal(signal.SIGTERM)
    assert await _end(child) == 7
    assert children.lines == ["ready", "ending"]
    assert not child.is_running


async def test_sigkill_takes_the_whole_group_along(children: _Children) -> None:
    child = children.start(
        """
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
        time.sleep(60)
        """
    )
    await children.until(lambda: bool(children.lines))
    grandchild = int(children.lines[0])
    child.send_signal(signal.SIGKILL)
    assert await _end(child) == -signal.SIGKILL
    await children.until(lambda: not _is_alive(grandchild))


async def test_a_signal_to_a_process_that_ended_does_nothing(children: _Children) -> None:
    child = children.start("pass")
    await _end(child)
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGKILL)
    assert await _end(child) == 0


async def test_a_cancelled_wait_leaves_the_child_to_the_next_one(children: _Children) -> None:
    child = children.start("import time\ntime.sleep(60)")
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
    assert child.is_running
    child.send_signal(signal.SIGKILL)
    assert await _end(child) == -signal.SIGKILL


async def test_a_child_has_a_session_of_its_own(children: _Children) -> None:
    child = children.start("import os\nprint(os.getsid(0))")
    await _end(child)
    assert children.lines == [str(child.pid)]


async def test_a_program_that_cannot_be_run_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    spec = ChildSpec("child", "decode", [str(tmp_path / "missing")])
    with pytest.raises(FileNotFoundError):
        ChildProcess(spec, tmp_path / "log", lambda _line: None)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_ended_child_leaves_nothing_open(children: _Children) -> None:
    await _end(children.start("pass"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await _end(children.start("print('x')"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_dies_with_its_parent_whatever_killed_that(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import asyncio, os, signal, sys
                from pathlib import Path
                from leadout.local.child_process import ChildProcess, ChildSpec

                async def main():
                    command = [sys.executable, "-c", "import time; time.sleep(60)"]
                    child = ChildProcess(ChildSpec("c", "decode", command), Path(sys.argv[1]), print)
                    print(child.pid, flush=True)
                    await child.wait()

                asyncio.run(main())
                """
            ),
            str(tmp_path / "log"),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        child = int(output.readline())
    assert _is_alive(child)
    parent.kill()
    assert parent.wait(_HANG_S) == -signal.SIGKILL
    give_up_at = time.monotonic() + _HANG_S
    while _is_alive(child):
        assert time.monotonic() < give_up_at, "the child outlived its parent"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
