"""The process that works on bodies for a router: reads calls from its standard input, and writes results.

It is started by ``router.body_workers``. A frame is a length and a pickle; the pipes connect two processes of
one program and nobody else. The first frame loads the text models, every further one is a call with them.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Call:
    """``function(text models by name, *arguments)``, which may raise ``expected``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    expected: type[Exception]


@dataclass(frozen=True)
class Result:
    """What a call returned, or the error that its caller is to raise; ``failure``: an unexpected one."""

    value: Any = None
    error: Exception | None = None
    failure: str = ""


def frame(message: object) -> tuple[bytes, bytes]:
    """``message`` as it goes through the pipe, in two parts: what is large is not copied once more."""
    packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(packed)), packed


def main() -> None:
    """Answer calls until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the router, which lets its requests finish
        signal.signal(number, signal.SIG_IGN)
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between the results
    calls = sys.stdin.buffer
    load = _read(calls)
    if load is None:
        return
    text_models = load()
    results.writelines(frame(Result()))
    results.flush()
    while (call := _read(calls)) is not None:
        results.writelines(frame(_run(call, text_models)))
        results.flush()
        del call


def _run(call: Call, text_models: object) -> Result:
    try:
        return Result(value=call.function(text_models, *call.arguments))
    except call.expected as error:
        return Result(error=error)
    except Exception:
        return Result(failure=traceback.format_exc())


def _read(pipe: BinaryIO) -> Any:
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    packed = pipe.read(length)
    return pickle.loads(packed) if len(packed) == length else None


if __name__ == "__main__":
    # The classes of the frames have this module's own name in both processes.
    from router.body_process import main as run

    run()
