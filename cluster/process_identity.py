"""Which process of which machine: tells one that is dead from one that is only silent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from cluster.members import WorkerRecord

_PROC = Path("/proc")
_CONNECT_TIMEOUT_S = 1.0
_START_TIME = 19  # field 22 of /proc/PID/stat, counted from behind the command's closing bracket


def own_process() -> str:
    """This process, as ``boot id/pid namespace/pid/start time``; "" where the system does not tell."""
    try:
        pid = os.getpid()
        return f"{_machine()}/{pid}/{_start_time(pid)}"
    except OSError:
        return ""


def is_running(process: str) -> bool | None:
    """Whether that process exists; None if it belongs to another machine or pid namespace.

    A stopped process runs: it may go on. A zombie does not: its memory is gone.
    """
    machine, _, rest = process.rpartition("/")[0].rpartition("/")
    try:
        if not process or machine != _machine():
            return None
    except OSError:
        return None
    start_time = process.rpartition("/")[2]
    try:
        return _start_time(int(rest)) == start_time
    except ValueError:
        return None  # it is no process of any machine
    except OSError:
        return False


class LivenessProbe:
    """Finds out whether workers that are absent from the registry can do nothing any more.

    On this machine a worker's process says so. On another one, somebody who takes connections at its address
    is alive, if perhaps frozen or cut off from the registry. A machine that cannot be reached at all counts
    as gone: with RDMA, the removal of its agent here ends its access. Lives in one asyncio loop.
    """

    def __init__(self) -> None:
        # A frozen process accepts nothing: each further connection would fill its queue, and in the end it
        # would look as if it could not be reached. So one is kept as long as its machine keeps it.
        self._open: dict[tuple[str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def is_gone(self, record: WorkerRecord) -> bool:
        """Whether that life of the worker is over."""
        running = is_running(record.process)
        if running is not None:
            return not running
        self._forget_closed()
        key = (record.id, record.incarnation)
        if key in self._open:
            return False
        address = urlsplit(record.address)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
        except (OSError, TimeoutError):
            return True
        _keep_alive(writer)
        self._open[key] = (reader, writer)
        return False

    def keep_only(self, lives: Collection[tuple[str, int]]) -> None:
        """Close the connections to all but these workers' lives (id, incarnation): nobody asks for them."""
        for key in self._open.keys() - set(lives):
            self._open.pop(key)[1].close()

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._open.values():
            writer.close()
        self._open.clear()

    def _forget_closed(self) -> None:
        for key, (reader, writer) in list(self._open.items()):
            if reader.at_eof() or reader.exception() is not None or writer.is_closing():
                writer.close()
                del self._open[key]


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice within half a minute that the other machine is gone."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _machine() -> str:
    boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat(_PROC / 'self/ns/pid').st_ino}"


def _start_time(pid: int) -> str:
    """Raises OSError if there is no such process, or only its zombie."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise ProcessLookupError(f"process {pid} is dead")
    return fields[_START_TIME]
