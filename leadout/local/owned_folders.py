"""Temporary folders that say whose they are, so that those of dead processes can be found and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from cluster.process_identity import is_running, own_process

_OWNER_FILE = ".owner"
_MAX_OWNER_BYTES = 1000
_CREATED, _REMOVED = ".created-", ".removed-"  # before the name of a folder that is on its way
_EARLIER_BOOT_AGE_S = 24 * 3600.0


def create_owned_folder(prefix: str) -> Path:
    """A new private folder (mode 0700) in the temporary directory, which names this process as its owner."""
    # Under another name until its owner is written: nobody sees it without one.
    folder = Path(tempfile.mkdtemp(prefix=f"{_CREATED}{prefix}"))
    (folder / _OWNER_FILE).write_text(own_process())
    return folder.rename(folder.with_name(folder.name.removeprefix(_CREATED)))


def abandoned_folders(prefix: str) -> list[Path]:
    """This user's folders of that prefix whose owner is dead; the one that changed last comes first.

    Left alone are folders that do not name an owner, and those of another pid namespace of this machine. One
    of another boot (or another machine that shares the directory) counts after a day.
    """
    names = tuple(f"{state}{prefix}" for state in ("", _CREATED, _REMOVED))
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(names):
                continue
            with contextlib.suppress(OSError):  # it has just been removed
                status = entry.stat(follow_symlinks=False)
                is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                if is_own_folder and _is_abandoned(Path(entry.path), status.st_mtime):
                    found.append((status.st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def take_over(folder: Path, target: Path) -> bool:
    """Move an abandoned folder to ``target``, without its owner; False where another process was quicker."""
    try:
        folder.rename(target)
    except OSError:
        return False
    (target / _OWNER_FILE).unlink(missing_ok=True)
    return True


def remove_abandoned(folder: Path) -> None:
    """Remove an abandoned folder. Harmless if another process is about to do the same."""
    with contextlib.suppress(OSError):
        if not folder.name.startswith(_REMOVED):  # by name first, so that nobody takes over half of it
            folder = folder.rename(folder.with_name(f"{_REMOVED}{folder.name}"))
        shutil.rmtree(folder)


def _is_abandoned(folder: Path, changed_at: float) -> bool:
    owner = _owner(folder)
    running = is_running(owner)
    if running is not None:
        return not running
    is_of_this_boot = owner.partition("/")[0] == own_process().partition("/")[0]
    return bool(owner) and not is_of_this_boot and time.time() - changed_at > _EARLIER_BOOT_AGE_S


def _owner(folder: Path) -> str:
    """The process that the folder names; "" if it names none."""
    try:
        descriptor = os.open(folder / _OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(_MAX_OWNER_BYTES).decode(errors="replace")
    except OSError:
        return ""
