"""Starts and commands a ``nixl_peer`` process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SHARED_MEMORY: Mapping[str, str] = {}  # what UCX chooses by itself on one host
TCP: Mapping[str, str] = {"UCX_TLS": "tcp,self"}


class CommandError(Exception):
    """The command raised in the process; the text is its type and message."""


class PeerProcess:
    """Call ``wait_until_ready`` before anything else, so that several can start at the same time."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        incarnation: int = 1,
        *,
        environment: Mapping[str, str] = SHARED_MEMORY,
        write_timeout_ms: int = 20_000,
    ) -> None:
        self.peer = [worker_id, incarnation]
        self.record = ""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.kv_transfer.nixl.nixl_peer"),
                *(worker_id, role, str(incarnation), str(write_timeout_ms)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )

    def wait_until_ready(self) -> None:
        self.record = self.answer()

    def __call__(self, command: str, **arguments: Any) -> Any:
        """Run a command of ``PeerServer``. Raises ``CommandError``."""
        self.post(command, **arguments)
        return self.answer()

    def post(self, command: str, **arguments: Any) -> None:
        """Send a command; ``answer`` must be called for it later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process of {self.peer} has ended with {self._process.wait(20)}"
        answer = json.loads(line)
        if "error" in answer:
            raise CommandError(answer["error"])
        return answer["result"]

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Also ends a frozen process. Idempotent."""
        self._process.kill()
        self._process.wait(20)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()

    def end(self) -> int:
        """Let the process come to its end, as it does when its input ends. The exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(20)


def connect(one: PeerProcess, other: PeerProcess) -> None:
    """Each becomes a peer of the other, both at the same time, as at registration."""
    one.post("add", record=other.record)
    other.post("add", record=one.record)
    one.answer()
    other.answer()
