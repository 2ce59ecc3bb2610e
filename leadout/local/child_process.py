"""One operating-system process of the local cluster: how it is started, read, awaited and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.end_with_parent import end_with_parent

_TAIL_LINES = 40
_MAX_LINE = 64 * 1024  # bytes; a longer line is passed on in pieces


@dataclass(frozen=True)
class ChildSpec:
    """What to start."""

    name: str
    role: str  # "router", or the role that a worker starts with: it may change, its name stays
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # the whole environment of the child
    num_threads: int = 0  # 0: not an engine process


class ChildProcess:
    """A started process whose output goes line by line to a log file and to ``on_line``.

    It has a session of its own, so that a Ctrl-C in the terminal reaches only the launcher, and the kernel
    kills it if the launcher dies, whatever killed that.
    """

    def __init__(self, spec: ChildSpec, log_file: Path, on_line: Callable[[str], None]) -> None:
        """Starts the process; must be called in the main thread of a running event loop.

        Raises OSError if the program cannot be run.
        """
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_line = on_line
        self._partial = b""
        self._loop = asyncio.get_running_loop()
        self._log = log_file.open("ab", buffering=0)
        read_end, write_end = os.pipe()
        try:
            self._popen = subprocess.Popen(
                list(spec.command),
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=dict(spec.environment),
                start_new_session=True,
                # Safe here: the launcher has no other thread, and the function only makes two system calls.
                preexec_fn=end_with_parent(),
            )
        except BaseException:
            os.close(read_end)
            self._log.close()
            raise
        finally:
            os.close(write_end)
        self.pid = self._popen.pid
        self._read_end = read_end
        os.set_blocking(read_end, False)
        self._loop.add_reader(read_end, self._read_output)
        self._exited = self._loop.create_task(self._wait())

    async def wait(self) -> int:
        """The exit status once the process has ended: negative is the signal that killed it."""
        return await asyncio.shield(self._exited)

    @property
    def is_running(self) -> bool:
        """Whether it has not been seen to end."""
        return not self._exited.done()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process; to its whole group if it is SIGKILL. No-op once it has ended."""
        if not self.is_running:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                self._popen.send_signal(number)
        except ProcessLookupError:
            pass

    async def _wait(self) -> int:
        if hasattr(os, "pidfd_open"):
            await _readable(self._loop, os.pidfd_open(self.pid))
            status = self._popen.wait()
        else:
            status = await asyncio.to_thread(self._popen.wait)
        self._read_output()  # what it wrote last
        self._close_output()
        return status

    def _read_output(self) -> None:
        """Reads what is there; bounded, so that a child that floods its log cannot starve the loop."""
        for _ in range(16):
            try:
                data = os.read(self._read_end, 65536) if self._read_end >= 0 else b""
            except BlockingIOError:
                return
            if not data:
                self._close_output()
                return
            self._log.write(data)
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > _MAX_LINE:
                lines.append(self._partial)
                self._partial = b""
            for line in lines:
                self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.tail.append(text)
        self._on_line(text)

    def _close_output(self) -> None:
        if self._read_end < 0:
            return
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1
        if self._partial:
            self._pass_on(self._partial)
            self._partial = b""
        self._log.close()


async def _readable(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    """Waits until ``descriptor`` is readable, then closes it."""
    ready: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, on_readable)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
