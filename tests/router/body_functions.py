"""Work for the processes that a test starts: they import it by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from router.api.errors import ApiError


def load_nothing() -> None:
    """Stands for loading the text model."""


def where(model: None, context: object, data: bytes) -> tuple[int, object, bytes]:
    """The process, and what it was given."""
    return os.getpid(), context, data


def chatter(model: None, context: object, data: bytes) -> str:
    """Write where the results are written."""
    print("noise", flush=True)
    os.write(1, b"more noise")
    return "quiet"


def refuse(model: None, context: object, data: bytes) -> None:
    """An error that a client is to be told."""
    raise ApiError(418, "no tea", error_type="t", param="p", code="c", retry_after=7)


def break_down(model: None, context: object, data: bytes) -> None:
    """An error that nobody expects."""
    raise KeyError("a bug")


def wait_for_file(model: None, path: Path, data: bytes) -> int:
    """Say that it has begun, and go on when ``path`` exists."""
    path.with_suffix(".begun").touch()
    while not path.exists():
        time.sleep(0.005)
    return os.getpid()


def touch(model: None, path: Path, data: bytes) -> None:
    """Leave a trace."""
    path.touch()


def die_until_file(model: None, path: Path, data: bytes) -> int:
    """End the process at the first call; the second one answers."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def die(model: None, context: object, data: bytes) -> None:
    """End the process at every call."""
    os.kill(os.getpid(), signal.SIGKILL)
