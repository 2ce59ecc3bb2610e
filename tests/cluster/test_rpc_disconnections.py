"""What a connection tells of a worker that goes away: real sockets, and a real process that dies or stops."""

from __future__ import annotations

import asyncio
import functools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cluster import rpc
from tests.cluster.rpc_cluster import LOCALHOST, Client, Cluster, Worker, numbered, numbers, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


def echoing(worker: Worker) -> Worker:
    worker.react = lambda peer, message: None if worker.server.send(peer, message) else pytest.fail("gone")
    return worker


async def is_served_again(client: Client, number: int) -> None:
    """Wait for the echo of a message that is repeated until then: delivery is at most once."""

    def is_answered() -> bool:
        client.connection.send(numbered(number))
        return number in numbers(client.messages)

    await until(is_answered, f"the echo of message {number}")


async def test_a_server_that_closes_is_told(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    assert client.num_disconnections == 0
    await worker.server.close()
    await until(lambda: client.num_disconnections > 0, "the disconnection")
    assert client.num_disconnections == 1


async def test_own_close_is_no_loss(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    other = await cluster.known_client(worker, address, sender="other")
    client.connection.close()
    await until(lambda: not worker.server.send("router", numbered(1)), "the end of the connection")
    await worker.server.close()
    await until(lambda: other.num_disconnections == 1, "the disconnection of the other one")
    assert client.num_disconnections == 0


async def test_a_worker_that_was_never_there_is_not_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts to connect fail until it listens. Nothing breaks, for nothing was there."""
    monkeypatch.setattr(rpc, "_RECONNECT_MS", 2)
    monkeypatch.setattr(rpc, "_RECONNECT_MAX_MS", 2)
    address = f"ipc://{tmp_path}/w"
    client = cluster.client(address)
    client.connection.send(numbered(1))
    await asyncio.sleep(0.1)  # for some attempts
    worker, _ = await cluster.worker(address)
    await until(lambda: bool(worker.received), "the message")
    assert client.num_disconnections == 0


async def test_a_connection_that_comes_back_works_and_may_break_again(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)

    def has_broken(times: int) -> bool:
        return client.num_disconnections >= times

    for life in range(1, 4):
        await worker.server.close()
        await until(functools.partial(has_broken, life), "the disconnection")
        worker = echoing(await cluster.worker_again(address, incarnation=life + 1))
        await is_served_again(client, life)
        assert client.envelopes[-1].incarnation == life + 1
        assert client.num_disconnections == life, "each loss is told once"


async def test_what_is_sent_while_it_is_away_arrives_when_it_is_back(cluster: Cluster) -> None:
    """So the order to stop a request that was moved reaches a worker that lives after all."""
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    await worker.server.close()
    await until(lambda: client.num_disconnections == 1, "the disconnection")
    for number in range(20):
        client.connection.send(numbered(number))
    worker = await cluster.worker_again(address, incarnation=2)
    await until(lambda: len(worker.received) == 20, "what was sent in between")
    assert numbers(worker.messages_of("router")) == list(range(20))


async def test_the_callback_may_close_the_connection(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    told: list[int] = []

    def close() -> None:
        told.append(len(told))
        closing.close()

    closing = rpc.RpcConnection(
        address, sender="closing", incarnation=1, on_message=lambda envelope: None, on_disconnected=close
    )
    closing.send(numbered(7))
    await until(lambda: bool(worker.received), "its message")
    await worker.server.close()
    await until(lambda: bool(told) and client.num_disconnections == 1, "the disconnections")
    with pytest.raises(rpc.RpcOverloadedError, match="is closed"):
        closing.send(numbered(1))
    assert told == [0]
    assert "Traceback" not in caplog.text


# --- processes ---------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with an echoing server, and its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.rpc_server_process", LOCALHOST],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        yield server, server.stdout.readline().strip()
        server.kill()


async def test_a_killed_process_is_told_at_once(
    cluster: Cluster, process: tuple[subprocess.Popen[str], str]
) -> None:
    server, address = process
    client = cluster.client(address)
    await is_served_again(client, 1)
    server.kill()
    await until(lambda: client.num_disconnections == 1, "the disconnection")


async def test_a_frozen_process_is_told_after_the_heartbeat_s_timeout_and_may_come_back(
    cluster: Cluster, process: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_HEARTBEAT_MS", 50)
    monkeypatch.setattr(rpc, "_HEARTBEAT_TIMEOUT_MS", 300)
    server, address = process
    client = cluster.client(address)
    await is_served_again(client, 1)
    server.send_signal(signal.SIGSTOP)
    await until(lambda: client.num_disconnections > 0, "the disconnection")
    server.send_signal(signal.SIGCONT)
    await is_served_again(client, 2)
