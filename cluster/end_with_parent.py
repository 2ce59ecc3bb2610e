"""Child processes that never outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent() -> Callable[[], None] | None:
    """A ``preexec_fn`` for a child: the kernel kills it when this process dies, however that happens.

    None where the system has no such thing (it is Linux's). Call it and start the child in the main thread:
    the kernel watches the thread that forked. All that the child calls is looked up here, before the fork.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()  # in a container it may be process 1

    def setup() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return setup
