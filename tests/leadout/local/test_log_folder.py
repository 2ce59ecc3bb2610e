"""Logs of launchers that are gone: the latest are kept at hand, the others removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from leadout.local.log_folder import create_log_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def dead_launcher(text: str, changed_at: float) -> Path:
    """The logs of a launcher that has ended."""
    code = "from leadout.local.log_folder import create_log_folder; print(create_log_folder())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(shown.stdout.strip())
    (folder / "worker-0.log").write_text(text)
    os.utime(folder, (changed_at, changed_at))
    return folder


def test_the_latest_logs_of_dead_launchers_are_kept_beside_the_new_ones(temporary: Path) -> None:
    dead_launcher("first", 100)
    second = dead_launcher("second", 200)  # keeps the first's
    assert (second / "previous" / "worker-0.log").read_text() == "first"
    own = create_log_folder()
    assert list(temporary.iterdir()) == [own]
    assert [file.name for file in own.iterdir() if file.name != ".owner"] == ["previous"]
    assert [file.name for file in (own / "previous").iterdir()] == ["worker-0.log"]
    assert (own / "previous" / "worker-0.log").read_text() == "second"


def test_a_living_launchers_logs_stay_where_they_are(temporary: Path) -> None:
    first, second = create_log_folder(), create_log_folder()
    assert sorted(temporary.iterdir()) == sorted([first, second])
    assert [file.name for file in second.iterdir()] == [".owner"]
