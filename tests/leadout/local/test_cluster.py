"""The launcher with tiny real processes in place of the router and the workers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cluster.config.settings import (
    LeadoutConfig,
    LocalConfig,
    ModelConfig,
    RegistryConfig,
    RouterConfig,
    WorkerConfig,
    load_config,
)
from leadout.errors import UserError
from leadout.local import cluster as local_cluster
from leadout.local import restart_policy
from leadout.local.child_process import ChildSpec
from leadout.local.cluster import ClusterEvents, LocalCluster

_HANG_S = 60  # only so that a broken test ends

# A worker says that it is there by writing its process id and its role to a file of its name. Its behaviour
# is the content of the file ``<name>.how``, read at each start.
_WORKER = """
import os, signal, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
how_file = folder / (name + ".how")
how = how_file.read_text() if how_file.exists() else ""
if how == "fail":
    print("reading the model")
    print("there is no such model")
    sys.exit(3)
if how == "be killed":
    os.kill(os.getpid(), signal.SIGKILL)
def end(*_):
    if how != "ignore":
        with (folder / "ended").open("a") as file: file.write(name + "\\n")
        os._exit(0)
signal.signal(signal.SIGTERM, end)
if how != "never ready":
    (folder / (name + ".new")).write_text(f"{os.getpid()} {sys.argv[3]}")
    os.replace(folder / (name + ".new"), folder / (name + ".pid"))
while True: time.sleep(60)
"""

# The router lists each worker that wrote its id. It ends a little after it was told to, so that a worker
# which was told at the same time would be first.
_ROUTER = """
import json, os, signal, socket, sys, time
from pathlib import Path
folder, port = Path(sys.argv[1]), int(sys.argv[2])
def end(*_):
    time.sleep(0.2)
    with (folder / "ended").open("a") as file: file.write("router-0\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port))
server.listen(16)
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    there = {file.stem: file.read_text().split() for file in folder.glob("*.pid")}
    workers = [
        {"id": name, "pid": int(pid), "role": role, "state": "ready"} for name, (pid, role) in there.items()
    ]
    body = json.dumps({"workers": workers, "routers": []}).encode()
    head = b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
    connection.sendall(head + body)
    connection.close()
"""


class _Launcher:
    """Makes clusters of small processes, and keeps what they tell their user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: list[tuple[str, str]] = []
        self.lines: list[tuple[str, str]] = []
        self.notices: list[str] = []
        self._clusters: list[LocalCluster] = []

    def cluster(
        self, *, own_registry: bool = False, port: int = 0, worker_grace_ms: int = _HANG_S * 1000
    ) -> LocalCluster:
        config = LeadoutConfig(
            router=RouterConfig(port=port, drain_grace_ms=_HANG_S * 1000),
            worker=WorkerConfig(drain_grace_ms=worker_grace_ms),
            local=LocalConfig(prefill=1, decode=1),
        )
        events = ClusterEvents(
            on_state=lambda name, state: self.states.append((name, state)),
            on_line=lambda name, line: self.lines.append((name, line)),
            on_notice=self.notices.append,
        )
        cluster = LocalCluster(config, events, own_registry=own_registry, log_folder=self.folder)
        self._clusters.append(cluster)
        return cluster

    async def started(self, *, own_registry: bool = False) -> LocalCluster:
        cluster = self.cluster(own_registry=own_registry)
        async with asyncio.timeout(_HANG_S):
            await cluster.start()
        return cluster

    def behave(self, name: str, how: str) -> None:
        (self.folder / f"{name}.how").write_text(how)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_HANG_S):
            while not holds():  # noqa: ASYNC110 — processes set no event
                await asyncio.sleep(0.01)

    async def stop_all(self) -> None:
        for cluster in self._clusters:
            cluster.kill()
            await cluster.stop()


def _small_children(folder: Path) -> Callable[[LeadoutConfig, str, int], list[ChildSpec]]:
    def specs(_config: LeadoutConfig, _registry_url: str, port: int) -> list[ChildSpec]:
        python = [sys.executable, "-S", "-E", "-c"]
        workers = [
            ChildSpec(name, role, [*python, _WORKER, str(folder), name, role])
            for name, role in (("worker-0", "prefill"), ("worker-1", "decode"))
        ]
        return [ChildSpec("router-0", "router", [*python, _ROUTER, str(folder), str(port)]), *workers]

    return specs


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Launcher]:
    monkeypatch.setattr(local_cluster, "_child_specs", _small_children(tmp_path))
    monkeypatch.setattr(local_cluster, "_POLL_S", 0.02)
    monkeypatch.setattr(local_cluster, "_WATCH_S", 0.02)
    monkeypatch.setattr(local_cluster, "_KILL_GRACE_S", 0.2)
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.01)
    made = _Launcher(tmp_path)
    yield made
    await made.stop_all()


async def test_start_returns_when_every_process_is_ready(launcher: _Launcher) -> None:
    cluster = launcher.cluster()
    async with asyncio.timeout(_HANG_S):
        state = await cluster.start()
    assert {worker["id"]: worker["pid"] for worker in state["workers"]} == {
        name: pid for name, pid in cluster.pids.items() if name != "router-0"
    }
    states = [
        ("router-0", "starting"),
        ("worker-0", "starting as prefill"),
        ("worker-1", "starting as decode"),
    ]
    assert launcher.states[:3] == states
    assert sorted(launcher.states[3:]) == [
        (name, state.replace("starting", "ready")) for name, state in states
    ]
    assert {file.stem for file in launcher.folder.glob("*.log")} == dict(states).keys()
    assert launcher.notices == []
    assert await cluster.cluster_state() == state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fail", "worker-0 exited with status 3 while starting:\nreading the model\nthere is no such model"),
        ("be killed", "worker-0 was killed by SIGKILL while starting:\n"),
    ],
)
async def test_a_process_that_dies_while_starting_is_named_with_its_last_lines(
    launcher: _Launcher, how: str, message: str
) -> None:
    launcher.behave("worker-0", how)
    cluster = launcher.cluster()
    with pytest.raises(UserError) as caught:
        async with asyncio.timeout(_HANG_S):
            await cluster.start()
    assert str(caught.value) == message
    pids = cluster.pids
    await cluster.stop()
    assert not any(_is_alive(pid) for pid in pids.values())


async def test_processes_that_are_never_ready_are_named(
    launcher: _Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_START_TIMEOUT_S", 0.3)
    launcher.behave("worker-1", "never ready")
    with pytest.raises(UserError, match=r"^not ready after 0 s: .*worker-1$"):
        await launcher.cluster().start()


async def test_a_port_in_use_is_named_before_anything_is_started(launcher: _Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cluster = launcher.cluster(port=port, own_registry=True)
        with pytest.raises(UserError, match=rf"cannot listen at 127\.0\.0\.1:{port}: .*--port"):
            await cluster.start()
    assert cluster.pids == {}


async def test_a_killed_worker_is_started_again_and_gets_ready(launcher: _Launcher) -> None:
    cluster = await launcher.started()
    first = cluster.pids
    launcher.states.clear()
    os.kill(first["worker-1"], signal.SIGKILL)
    await launcher.until(lambda: ("worker-1", "ready as decode") in launcher.states)
    assert launcher.states == [("worker-1", "starting as decode"), ("worker-1", "ready as decode")]
    assert launcher.notices == ["worker-1 was killed by SIGKILL, starting it again in 0.01 s"]
    second = cluster.pids
    assert second.pop("worker-1") != first.pop("worker-1")
    assert second == first
    assert not cluster.given_up.is_set()


async def test_a_worker_that_was_drained_is_not_started_again(launcher: _Launcher) -> None:
    cluster = await launcher.started()
    os.kill(cluster.pids["worker-1"], signal.SIGTERM)
    await launcher.until(lambda: ("worker-1", "drained") in launcher.states)
    assert launcher.notices == ["worker-1 has drained and is not started again"]
    assert not cluster.given_up.is_set()
    await cluster.stop()
    assert launcher.states[-1] == ("worker-1", "drained")


async def test_a_killed_router_is_started_again_at_the_same_address(launcher: _Launcher) -> None:
    cluster = await launcher.started()
    url = cluster.url
    launcher.states.clear()
    os.kill(cluster.pids["router-0"], signal.SIGKILL)
    await launcher.until(lambda: launcher.states == [("router-0", "starting"), ("router-0", "ready")])
    assert cluster.url == url
    assert len((await cluster.cluster_state() or {})["workers"]) == 2


async def test_a_process_that_dies_again_and_again_is_given_up(launcher: _Launcher) -> None:
    cluster = await launcher.started()
    launcher.behave("worker-1", "fail")
    os.kill(cluster.pids["worker-1"], signal.SIGKILL)
    async with asyncio.timeout(_HANG_S):
        await cluster.given_up.wait()
    *restarts, end = launcher.notices
    assert restarts == [
        "worker-1 was killed by SIGKILL, starting it again in 0.01 s",
        "worker-1 exited with status 3, starting it again in 0.02 s",
        "worker-1 exited with status 3, starting it again in 0.04 s",
        "worker-1 exited with status 3, starting it again in 0.08 s",
    ]
    assert end == (
        "worker-1 exited with status 3 and is not started again: it died 5 times within 60 s\n"
        "reading the model\nthere is no such model"
    )
    assert launcher.lines.count(("worker-1", "there is no such model")) == 4
    assert _is_alive(cluster.pids["worker-0"])


async def test_the_router_ends_before_the_workers(launcher: _Launcher) -> None:
    cluster = await launcher.started()
    await cluster.stop()
    first, *rest = (launcher.folder / "ended").read_text().split()
    assert first == "router-0"
    assert sorted(rest) == ["worker-0", "worker-1"]
    assert not any(_is_alive(pid) for pid in cluster.pids.values())
    assert launcher.notices == []  # nothing is started again


async def test_a_process_that_does_not_end_is_killed(launcher: _Launcher) -> None:
    launcher.behave("worker-1", "ignore")
    cluster = launcher.cluster(worker_grace_ms=100)
    async with asyncio.timeout(_HANG_S):
        await cluster.start()
        await cluster.stop()
    assert "worker-1" not in (launcher.folder / "ended").read_text().split()
    assert not any(_is_alive(pid) for pid in cluster.pids.values())


async def test_kill_waits_for_nobody(launcher: _Launcher) -> None:
    cluster = await launcher.started()
    cluster.kill()
    async with asyncio.timeout(_HANG_S):
        await cluster.stop()
    assert not (launcher.folder / "ended").exists()
    assert not any(_is_alive(pid) for pid in cluster.pids.values())


async def test_a_start_that_is_cancelled_can_be_stopped(launcher: _Launcher) -> None:
    launcher.behave("worker-1", "never ready")
    cluster = launcher.cluster()
    starting = asyncio.create_task(cluster.start())
    await launcher.until(lambda: ("worker-0", "ready as prefill") in launcher.states)
    starting.cancel()
    await cluster.stop()
    assert starting.cancelled()
    assert not any(_is_alive(pid) for pid in cluster.pids.values())


async def test_a_killed_registry_is_started_again_at_the_same_address(launcher: _Launcher) -> None:
    cluster = await launcher.started(own_registry=True)
    assert cluster._registry is not None
    url, pid = cluster._registry.url, cluster.pids["registry"]
    os.kill(pid, signal.SIGKILL)
    await launcher.until(lambda: cluster.pids.get("registry", pid) != pid)
    assert cluster._registry.url == url
    assert launcher.notices == ["the registry died, starting it again"]
    second = cluster.pids["registry"]
    await cluster.stop()
    assert "registry" not in cluster.pids
    assert not _is_alive(second)


async def test_a_registry_that_cannot_be_started_again_ends_it(
    launcher: _Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await launcher.started(own_registry=True)

    def no_server() -> Path:
        raise OSError("no server any more")

    monkeypatch.setattr("leadout.local.embedded_registry.find_server_binary", no_server)
    os.kill(cluster.pids["registry"], signal.SIGKILL)
    async with asyncio.timeout(_HANG_S):
        await cluster.given_up.wait()
    assert launcher.notices[-1] == "the registry is not started again: no server any more"


def test_what_is_started_for_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("LEADOUT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(local_cluster, "available_cores", lambda: 6)
    config = LeadoutConfig(
        registry=RegistryConfig(namespace="mine"),
        local=LocalConfig(prefill=1, decode=2),
        model=ModelConfig(source="m"),
    )
    monkeypatch.setenv("LEADOUT_CONFIG", str(tmp_path / "read-already.yaml"))
    monkeypatch.setenv("SOME_VARIABLE", "kept")
    specs = local_cluster._child_specs(config, "unix:///registry.sock", 1234)
    program = [sys.executable, "-m", "leadout"]
    assert [(spec.name, spec.role, list(spec.command)) for spec in specs] == [
        ("router-0", "router", [*program, "router", "--id", "router-0"]),
        ("worker-0", "prefill", [*program, "worker", "--role", "prefill", "--id", "worker-0"]),
        ("worker-1", "decode", [*program, "worker", "--role", "decode", "--id", "worker-1"]),
        ("worker-2", "decode", [*program, "worker", "--role", "decode", "--id", "worker-2"]),
    ]
    for spec in specs:
        assert spec.environment["OMP_NUM_THREADS"] == "2"
        assert spec.environment["SOME_VARIABLE"] == "kept"
    monkeypatch.delenv("LEADOUT_CONFIG")
    for name, value in specs[-1].environment.items():
        monkeypatch.setenv(name, value)
    read = load_config()  # as the child reads it
    assert (read.registry.url, read.registry.namespace) == ("unix:///registry.sock", "mine")
    assert (read.router.port, read.engine.num_threads, read.model.source) == (1234, 2, "m")


def _is_alive(pid: int) -> bool:
    """Whether a child of this process runs, or ended and was not awaited."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
