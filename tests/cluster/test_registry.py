"""Membership against a real server: leases, incarnations, and a server that goes away and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from cluster.config import RegistryConfig
from cluster.embedded_registry import EmbeddedRegistry
from cluster.members import Members, RouterRecord
from cluster.registry import Registry, RegistryUnavailableError, StaleIncarnationError
from tests.router.factories import worker_record

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRegistry]:
    server = EmbeddedRegistry()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def make(server: EmbeddedRegistry) -> AsyncIterator[object]:
    """Makes registries of one namespace; ``lease_ms`` and ``heartbeat_ms`` as given."""
    opened: list[Registry] = []
    namespace = f"test-{os.urandom(4).hex()}"

    def make(lease_ms: int = 600, heartbeat_ms: int = 100) -> Registry:
        if not server.is_running():
            server.start()
        opened.append(
            Registry(
                RegistryConfig(
                    url=server.url, namespace=namespace, lease_ms=lease_ms, heartbeat_ms=heartbeat_ms
                )
            )
        )
        return opened[-1]

    yield make
    for registry in opened:
        await registry.close()


def ids(members: Members) -> list[str]:
    return [record.id for record in (*members.workers, *members.routers)]


async def until(registry: Registry, wanted: list[str], timeout_s: float = 5.0) -> Members:
    async with asyncio.timeout(timeout_s):
        async for members in registry.watch():
            if ids(members) == wanted:
                return members
    raise AssertionError


async def test_registered_processes_are_seen_with_all_they_said(make) -> None:  # type: ignore[no-untyped-def]
    one, two = make(), make()
    worker = worker_record("decode-0", "decode")
    router = RouterRecord(id="router-0", incarnation=3, pid=1, host="h", address="http://127.0.0.1:1")
    await one.register(worker)
    await one.register(router)
    members = await two.members()
    assert members.workers == (worker,)
    assert members.routers == (router,)
    await one.withdraw(worker)
    assert ids(await two.members()) == ["router-0"]


async def test_a_lease_is_renewed_while_the_process_lives_and_ends_with_it(make) -> None:  # type: ignore[no-untyped-def]
    one, two = make(), make()
    await one.register(worker_record("decode-0", "decode"))
    await asyncio.sleep(1.5)  # more than two leases
    assert ids(await two.members()) == ["decode-0"]
    await one.close()  # without withdrawing, as after a crash
    await until(two, [], 3)


async def test_watchers_hear_of_a_change_before_the_heartbeat(make) -> None:  # type: ignore[no-untyped-def]
    watcher, other = make(lease_ms=60_000, heartbeat_ms=30_000), make()
    seen = asyncio.create_task(until(watcher, ["decode-0"]))
    await asyncio.sleep(0.3)
    await other.register(worker_record("decode-0", "decode"))
    await asyncio.wait_for(seen, 5)


async def test_an_older_incarnation_can_neither_replace_nor_remove_a_newer_one(make) -> None:  # type: ignore[no-untyped-def]
    old, new = make(), make()
    await old.register(worker_record("decode-0", "decode", incarnation=5))
    await new.register(worker_record("decode-0", "decode", incarnation=1_700_000_000_000_000_001))
    await asyncio.wait_for(old.superseded.wait(), 3)
    with pytest.raises(StaleIncarnationError, match="decode-0"):
        await old.register(worker_record("decode-0", "decode", incarnation=1_700_000_000_000_000_000))
    await old.withdraw(worker_record("decode-0", "decode", incarnation=5))
    (record,) = (await new.members()).workers
    assert record.incarnation == 1_700_000_000_000_000_001


async def test_a_server_that_comes_back_empty_costs_no_member(make, server: EmbeddedRegistry) -> None:  # type: ignore[no-untyped-def]
    one, watcher = make(lease_ms=2000), make(lease_ms=2000)
    await one.register(worker_record("decode-0", "decode"))
    seen: list[list[str]] = []

    async def watch() -> None:
        async for members in watcher.watch():
            seen.append(ids(members))

    task = asyncio.create_task(watch())
    await asyncio.sleep(0.3)
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.sleep(0.5)
    with pytest.raises(RegistryUnavailableError, match="registry unix://"):
        await watcher.members()
    url = server.url
    server.start()
    assert server.url == url
    await asyncio.sleep(2.5)
    before = len(seen)
    assert all(members == ["decode-0"] for members in seen), seen
    await until(make(), ["decode-0"], 3)  # a newcomer sees it too: it has registered again
    await one.close()
    await asyncio.sleep(3)
    task.cancel()
    assert len(seen) > before
    assert seen[-1] == [], "a member that is really gone must not stay for ever"


async def test_an_unreachable_server_is_an_error_without_the_password() -> None:
    registry = Registry(RegistryConfig(url="redis://user:secret@127.0.0.1:1/0"))
    with pytest.raises(RegistryUnavailableError) as error:
        await registry.register(worker_record("decode-0", "decode"))
    assert "127.0.0.1" in str(error.value)
    assert "secret" not in str(error.value)
    await registry.close()


async def test_a_record_that_cannot_be_read_is_ignored(make) -> None:  # type: ignore[no-untyped-def]
    registry = make()
    await registry.register(worker_record("decode-0", "decode"))
    await registry._client.set(f"{registry._prefix}worker:future", b"0" * 20 + b"\xc1")
    await registry._client.sadd(f"{registry._prefix}workers", "future")
    assert ids(await registry.members()) == ["decode-0"]
