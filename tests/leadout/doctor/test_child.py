"""Child processes of checks: what their end looks like to the check."""

from __future__ import annotations

import os
import signal

import pytest

from leadout.doctor.child import Child, ChildError

pytestmark = pytest.mark.processes


def test_one_that_cannot_start_is_quoted() -> None:
    with Child("no_such_module") as child, pytest.raises(ChildError, match=r"status 1 .*No module named"):
        child.answer(30)


def test_one_that_crashes_names_the_signal() -> None:
    with Child("nixl_probe") as child:  # it waits for its settings
        os.kill(child.pid, signal.SIGSEGV)
        with pytest.raises(ChildError, match="was ended by SIGSEGV"):
            child.answer(30)


def test_one_that_does_not_answer_is_ended() -> None:
    with Child("nixl_probe") as child:
        with pytest.raises(ChildError, match=r"nixl_probe did not answer within 0\.1 s"):
            child.answer(0.1)
        pid = child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
