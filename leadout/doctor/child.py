"""A child process of a check: it gets one JSON line, and answers among whatever libraries print.

Native libraries run in a child because they may crash, hang, or write to standard output.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self

from cluster.end_with_parent import end_with_parent

_ANSWER = "leadout-answer "
_MAX_LOG_LINES = 5000


class ChildError(RuntimeError):
    """The child reported an error, crashed, or did not answer in time; the message says which."""


class Child:
    """One run of a module of this package. A context manager that leaves no process behind."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str | None] | None = None
    ) -> None:
        """``environment`` is added to this process's; None removes a variable."""
        merged = {**os.environ, **(environment or {})}
        self._module = module
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.log: list[str] = []  # what it printed, without the answers
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"leadout.doctor.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: value for name, value in merged.items() if value is not None},
            preexec_fn=end_with_parent(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send one line. A child that has ended already is found by ``answer``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:  # a broken pipe
            return

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises ChildError."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self._module} did not answer within {timeout_s:g} s") from None
        if answer is None:
            last = next((line for line in reversed(self.log) if line.strip()), "nothing")
            raise ChildError(f"{self._module} {_how_ended(self._process.wait())}; it printed last: {last}")
        if "error" in answer:
            raise ChildError(str(answer["error"]))
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                self._answers.put(json.loads(line.removeprefix(_ANSWER)))
            elif len(self.log) < _MAX_LOG_LINES:
                self.log.append(line.rstrip("\n"))
        self._answers.put(None)


def ask(module: str, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Run a module that takes one message and gives one answer. Raises ChildError."""
    with Child(module) as child:
        child.tell(message)
        return child.answer(timeout_s)


def read_message() -> dict[str, Any]:
    """In the child: the next message; empty when the parent has nothing more to say."""
    line = sys.stdin.readline()
    message: dict[str, Any] = json.loads(line) if line else {}
    return message


def send_answer(fields: Mapping[str, Any]) -> None:
    """In the child: answer the parent."""
    # The line break first: a library may have printed half a line.
    print(f"\n{_ANSWER}{json.dumps(fields)}", flush=True)


def _how_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status} and no answer"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
