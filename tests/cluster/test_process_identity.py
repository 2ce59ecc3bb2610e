"""Dead or only silent: real processes on this machine, real sockets for the others."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster import process_identity
from cluster.process_identity import LivenessProbe, is_running, own_process
from tests.cluster.rpc_cluster import until
from tests.router.factories import worker_record

ROOT = Path(__file__).parents[2]
FAR_AWAY = "another-boot-id/4026531836/1/100"


class Child:
    """A process and its identity."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.identity_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.identity = self.process.stdout.readline().strip()

    @property
    def state(self) -> str:
        """``S``, ``T`` or ``Z``, as ``ps`` says; "" once it has been waited for."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


# --- on this machine ---------------------------------------------------------------------------------------


def test_this_process_runs() -> None:
    assert own_process() == own_process()
    assert f"/{os.getpid()}/" in own_process()
    assert is_running(own_process()) is True


def test_a_child_runs_until_it_has_ended(child: Child) -> None:
    assert child.identity != own_process()
    assert is_running(child.identity) is True
    child.process.communicate()
    assert child.process.returncode == 0
    assert is_running(child.identity) is False


async def test_a_zombie_is_dead(child: Child) -> None:
    """Its memory is gone, though nobody has waited for it yet."""
    child.process.kill()
    await until(lambda: child.state == "Z", "its end")
    assert is_running(child.identity) is False
    assert child.state == "Z"


async def test_a_stopped_process_may_go_on(child: Child) -> None:
    child.process.send_signal(signal.SIGSTOP)
    await until(lambda: child.state == "T", "its stop")
    assert is_running(child.identity) is True
    child.process.kill()
    await until(lambda: child.state == "Z", "its end")
    assert is_running(child.identity) is False


def test_another_process_under_the_same_pid_is_another_process(child: Child) -> None:
    same_pid, _, start_time = child.identity.rpartition("/")
    assert is_running(f"{same_pid}/{int(start_time) - 1}") is False


@pytest.mark.parametrize("part", [0, 1])
def test_the_processes_of_other_machines_and_namespaces_are_not_known(part: int) -> None:
    parts = own_process().split("/")
    parts[part] = "other"
    assert is_running("/".join(parts)) is None


@pytest.mark.parametrize("process", ["", "/", "a", "a/b", FAR_AWAY])
def test_an_identity_of_nothing_here(process: str) -> None:
    assert is_running(process) is None


def test_an_identity_without_a_process_id_is_of_nothing() -> None:
    boot, namespace, _, start_time = own_process().split("/")
    assert is_running(f"{boot}/{namespace}/x/{start_time}") is None
    assert is_running(f"{boot}/{namespace}//") is None


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = own_process()
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    assert own_process() == ""
    assert is_running(own) is None
    assert is_running("") is None


@pytest.fixture
async def probe() -> AsyncIterator[LivenessProbe]:
    probe = LivenessProbe()
    yield probe
    probe.close()


# --- whether a worker is gone ------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def test_on_this_machine_the_process_decides(
    child: Child, listener: socket.socket, probe: LivenessProbe
) -> None:
    """Whatever its address says: somebody else may have it by now, or it may be closed already."""
    closed = worker_record("w", address="tcp://127.0.0.1:1", process=child.identity)
    taken_over = worker_record("w", address=address_of(listener), process=child.identity)
    assert not await probe.is_gone(closed)
    child.end()
    assert await probe.is_gone(closed)
    assert await probe.is_gone(taken_over)


@pytest.mark.parametrize("process", [FAR_AWAY, ""])
async def test_elsewhere_who_takes_connections_is_alive(
    listener: socket.socket, process: str, probe: LivenessProbe
) -> None:
    """This one never answers: its process may be frozen."""
    assert not await probe.is_gone(worker_record("w", address=address_of(listener), process=process))


async def test_elsewhere_who_refuses_connections_is_gone(
    listener: socket.socket, probe: LivenessProbe
) -> None:
    address = address_of(listener)
    listener.close()
    assert await probe.is_gone(worker_record("w", address=address, process=FAR_AWAY))


async def test_a_port_that_is_held_but_not_listened_at_refuses(probe: LivenessProbe) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        assert await probe.is_gone(worker_record("w", address=address_of(holder), process=FAR_AWAY))


async def test_a_machine_that_does_not_answer_is_gone(
    monkeypatch: pytest.MonkeyPatch, probe: LivenessProbe
) -> None:
    """192.0.2.1 belongs to nobody (RFC 5737): there is no route to it, or no answer."""
    monkeypatch.setattr(process_identity, "_CONNECT_TIMEOUT_S", 0.05)
    assert await probe.is_gone(worker_record("w", address="tcp://192.0.2.1:9", process=FAR_AWAY))


async def test_a_name_that_nobody_knows_is_gone(
    monkeypatch: pytest.MonkeyPatch, probe: LivenessProbe
) -> None:
    monkeypatch.setattr(process_identity, "_CONNECT_TIMEOUT_S", 5.0)
    assert await probe.is_gone(worker_record("w", address="tcp://no-such-host.invalid:9", process=FAR_AWAY))


async def test_a_frozen_process_elsewhere_is_alive_however_often_it_is_asked_for(
    probe: LivenessProbe,
) -> None:
    """It accepts nothing, and its queue is short."""
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen(1)
        record = worker_record("w", address=address_of(frozen), process=FAR_AWAY)
        for _ in range(20):
            assert not await probe.is_gone(record)
    await until_async(lambda: probe.is_gone(record))


async def test_connections_are_kept_to_those_in_question_only(
    listener: socket.socket, probe: LivenessProbe
) -> None:
    before = psutil.Process().num_fds()
    records = [worker_record(f"w{i}", address=address_of(listener), process=FAR_AWAY) for i in range(20)]
    for record in records:
        assert not await probe.is_gone(record)
    assert psutil.Process().num_fds() == before + 20
    probe.keep_only([(records[0].id, records[0].incarnation), ("never asked for", 1)])
    await until_async(lambda: has_open(before + 1))
    assert not await probe.is_gone(records[0])
    assert psutil.Process().num_fds() == before + 1
    probe.keep_only([])
    await until_async(lambda: has_open(before))


async def has_open(num_files: int) -> bool:
    return psutil.Process().num_fds() == num_files


async def until_async(holds: Callable[[], Awaitable[bool]]) -> None:
    """Poll: the end of the other side arrives in its own time."""
    for _ in range(1000):
        if await holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it is still not so")
