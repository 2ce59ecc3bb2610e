"""Temporary folders of dead processes are found; those of anybody else are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.process_identity import own_process
from leadout.local import owned_folders
from leadout.local.owned_folders import abandoned_folders, create_owned_folder, remove_abandoned, take_over

PREFIX = "leadout-test-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this test and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def abandoned() -> Path:
    """A folder with a file, of a process that has ended."""
    code = (
        f"from leadout.local.owned_folders import create_owned_folder; print(create_owned_folder({PREFIX!r}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(shown.stdout.strip())
    (folder / "file").write_text("text")
    return folder


def named(temporary: Path, owner: str, name: str = "x") -> Path:
    folder = temporary / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / ".owner").write_text(owner)
    return folder


def test_a_folder_is_private_whatever_the_umask_is(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = create_owned_folder(PREFIX)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent == temporary
    assert folder.name.startswith(PREFIX)


def test_the_folder_of_a_living_process_is_left_alone(temporary: Path) -> None:
    create_owned_folder(PREFIX)
    assert abandoned_folders(PREFIX) == []
    assert len(list(temporary.iterdir())) == 1


def test_folders_of_dead_processes_are_found_the_latest_first() -> None:
    folders = [abandoned() for _ in range(3)]
    for age, folder in enumerate(folders):
        os.utime(folder, (0, 1_000_000 - age))
    assert abandoned_folders(PREFIX) == folders
    assert abandoned_folders("another-") == []
    for folder in folders:
        remove_abandoned(folder)
        remove_abandoned(folder)  # harmless
    assert not any(folder.exists() for folder in folders)


def test_a_process_id_that_was_given_anew_is_another_process(temporary: Path) -> None:
    boot, namespace, pid, start_time = own_process().split("/")
    folder = named(temporary, f"{boot}/{namespace}/{pid}/{int(start_time) + 1}")
    assert abandoned_folders(PREFIX) == [folder]


def test_of_an_earlier_boot_it_counts_after_a_day(temporary: Path) -> None:
    folder = named(temporary, "an-earlier-boot/4026531836/1/2")
    assert abandoned_folders(PREFIX) == []
    os.utime(folder, (0, 0))
    assert abandoned_folders(PREFIX) == [folder]


@pytest.mark.parametrize(
    "owner",
    [
        "",
        own_process().replace(own_process().split("/")[1], "1"),  # of another container of this machine
    ],
)
def test_an_owner_that_cannot_be_known_is_left_alone(temporary: Path, owner: str) -> None:
    folder = named(temporary, owner)
    os.utime(folder, (0, 0))
    assert abandoned_folders(PREFIX) == []


def test_a_folder_without_an_owner_is_left_alone(temporary: Path) -> None:
    folder = temporary / f"{PREFIX}x"
    folder.mkdir()
    os.utime(folder, (0, 0))
    assert abandoned_folders(PREFIX) == []


def test_links_are_not_followed(temporary: Path) -> None:
    target = abandoned()
    elsewhere = target.rename(temporary / "elsewhere")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    folder = temporary / f"{PREFIX}x"
    folder.mkdir()
    (folder / ".owner").symlink_to(elsewhere / ".owner")
    (temporary / f"{PREFIX}file").write_text("text")
    assert abandoned_folders(PREFIX) == []


def test_what_a_removed_folder_links_to_stays(temporary: Path) -> None:
    kept = temporary / "kept"
    kept.mkdir()
    (kept / "file").write_text("text")
    folder = abandoned()
    (folder / "link").symlink_to(kept)
    remove_abandoned(folder)
    assert (kept / "file").read_text() == "text"
    assert not folder.exists()


def test_anothers_folder_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned()
    monkeypatch.setattr(owned_folders.os, "getuid", lambda: os.geteuid() + 1)
    assert abandoned_folders(PREFIX) == []


def test_what_a_removal_left_half_done_is_removed_the_next_time() -> None:
    folder = abandoned()
    half_done = folder.rename(folder.with_name(f".removed-{folder.name}"))
    (found,) = abandoned_folders(PREFIX)
    assert found == half_done
    remove_abandoned(found)
    assert not half_done.exists()


def test_of_several_at_once_one_takes_a_folder_over(temporary: Path) -> None:
    folder = abandoned()
    results = at_once(4, lambda number: take_over(folder, temporary / f"target-{number}"))
    assert sorted(results) == [False, False, False, True]
    (target,) = temporary.glob("target-*")
    assert {file.name for file in target.iterdir()} == {"file"}


def test_several_may_remove_at_once(temporary: Path) -> None:
    for _ in range(5):
        abandoned()

    def remove(_: int) -> bool:
        for folder in abandoned_folders(PREFIX):
            remove_abandoned(folder)
        return True

    assert at_once(4, remove) == [True] * 4
    assert list(temporary.iterdir()) == []


def at_once(count: int, function: Callable[[int], bool]) -> list[bool]:
    """Results of ``function`` in as many threads, which begin together."""
    barrier, results = threading.Barrier(count), [False] * count

    def run(number: int) -> None:
        barrier.wait()
        results[number] = function(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
