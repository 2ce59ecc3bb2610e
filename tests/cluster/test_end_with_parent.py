"""Children die with their parent, also where the parent is the first process of a container."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.end_with_parent import end_with_parent

pytestmark = pytest.mark.processes


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_of_a_living_parent_runs() -> None:
    command = [sys.executable, "-c", "print('alive')"]
    shown = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_parent(), check=True)
    assert shown.stdout == "alive\n"


def test_a_child_whose_parent_is_process_1_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose command is the launcher."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    setup = end_with_parent()
    assert setup is not None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    setup()  # would end this process if it took process 1 for a sign that the parent has died


def test_a_killed_parent_takes_its_child_along() -> None:
    code = (
        "import subprocess, sys, time; from cluster.end_with_parent import end_with_parent\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " preexec_fn=end_with_parent())\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    give_up_at = time.monotonic() + 5
    while is_running(child) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert not is_running(child)
