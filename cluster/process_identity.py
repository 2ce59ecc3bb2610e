"""Which process of which machine: tells one that is dead from one that is only silent."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
    except OSError:
        return False


async def is_gone(record: WorkerRecord) -> bool:
    """Whether a worker that is absent from the registry can do nothing any more.

    On this machine its process says so. On another one, somebody who takes connections at its address is
    alive, if perhaps frozen or cut off from the registry. A machine that cannot be reached at all counts as
    gone: with RDMA, the removal of its agent here ends its access.
    """
    running = is_running(record.process)
    if running is not None:
        return not running
    address = urlsplit(record.address)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
    except (OSError, TimeoutError):
        return True
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


def _machine() -> str:
    boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat(_PROC / 'self/ns/pid').st_ino}"


def _start_time(pid: int) -> str:
    """Raises OSError if there is no such process, or only its zombie."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise ProcessLookupError(f"process {pid} is dead")
    return fields[_START_TIME]
