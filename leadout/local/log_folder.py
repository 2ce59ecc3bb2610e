"""The folder for the logs of a launcher's processes, and what becomes of those of dead launchers."""

from __future__ import annotations

import shutil
from pathlib import Path

from leadout.local.owned_folders import abandoned_folders, create_owned_folder, remove_abandoned, take_over

_PREFIX = "leadout-logs-"
_PREVIOUS = "previous"


def create_log_folder() -> Path:
    """A new folder for this launcher's logs. Those of launchers that are gone are removed.

    Except the latest ones, which become its subfolder ``previous``: who starts again after a crash wants to
    read them.
    """
    folder = create_owned_folder(_PREFIX)
    previous = folder / _PREVIOUS
    for abandoned in abandoned_folders(_PREFIX):
        if previous.exists() or not take_over(abandoned, previous):
            remove_abandoned(abandoned)
    shutil.rmtree(previous / _PREVIOUS, ignore_errors=True)
    return folder
