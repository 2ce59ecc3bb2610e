"""Membership against a real server: leases, incarnations, and a server that goes away and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from cluster.clock import Clock, ManualClock
from cluster.config.settings import RegistryConfig
from cluster.members import Members, RouterRecord
from cluster.registry import Registry, RegistryUnavailableError, StaleIncarnationError
from leadout.local.embedded_registry import EmbeddedRegistry
from tests.router.factories import worker_record

pytestmark = pytest.mark.processes

WORKER = worker_record("decode-0", "decode", incarnation=1_700_000_000_000_000_000)
ROUTER = RouterRecord(id="router-0", incarnation=3, pid=1, host="h", address="http://127.0.0.1:1")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRegistry]:
    server = EmbeddedRegistry()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def make(server: EmbeddedRegistry) -> AsyncIterator[object]:
    """Makes registries of one namespace. No lease ends, and no heartbeat comes, unless a test asks for it."""
    opened: list[Registry] = []
    namespace = f"test-{os.urandom(4).hex()}"

    def make(lease_ms: int = 60_000, heartbeat_ms: int = 30_000, clock: Clock | None = None) -> Registry:
        if not server.is_running():
            server.start()
        opened.append(
            Registry(
                RegistryConfig(
                    url=server.url, namespace=namespace, lease_ms=lease_ms, heartbeat_ms=heartbeat_ms
                ),
                clock,
            )
        )
        return opened[-1]

    yield make
    for registry in opened:
        await registry.close()


def ids(members: Members) -> list[str]:
    return [record.id for record in (*members.workers, *members.routers)]


async def until(registry: Registry, wanted: list[str], timeout_s: float = 30.0) -> Members:
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


async def test_a_lease_is_renewed_while_the_process_lives(make) -> None:  # type: ignore[no-untyped-def]
    one = make(heartbeat_ms=20)
    record = worker_record("decode-0", "decode")
    await one.register(record)
    remaining_ms = await one._client.pttl(one._key(record))
    assert 0 < remaining_ms <= 60_000
    while await one._client.pttl(one._key(record)) <= remaining_ms:  # until it was renewed
        remaining_ms = min(remaining_ms, await one._client.pttl(one._key(record)))
        await asyncio.sleep(0.01)


async def test_a_lease_that_is_not_renewed_ends(make) -> None:  # type: ignore[no-untyped-def]
    await make(lease_ms=100, heartbeat_ms=50).renew(worker_record("decode-0", "decode"))
    await until(make(heartbeat_ms=20), [])


async def test_watchers_hear_of_a_change_before_the_heartbeat(make) -> None:  # type: ignore[no-untyped-def]
    watcher, other = make(), make()
    lists = watcher.watch()
    assert ids(await anext(lists)) == []  # it has subscribed before
    await other.register(worker_record("decode-0", "decode"))
    async with asyncio.timeout(20):  # less than the heartbeat
        assert ids(await anext(lists)) == ["decode-0"]
    await lists.aclose()


async def test_an_older_incarnation_can_neither_replace_nor_remove_a_newer_one(make) -> None:  # type: ignore[no-untyped-def]
    old, new = make(heartbeat_ms=20), make()
    await old.register(worker_record("decode-0", "decode", incarnation=5))
    await new.register(worker_record("decode-0", "decode", incarnation=1_700_000_000_000_000_001))
    await asyncio.wait_for(old.superseded.wait(), 30)
    with pytest.raises(StaleIncarnationError, match="decode-0"):
        await old.register(worker_record("decode-0", "decode", incarnation=1_700_000_000_000_000_000))
    await old.withdraw(worker_record("decode-0", "decode", incarnation=5))
    (record,) = (await new.members()).workers
    assert record.incarnation == 1_700_000_000_000_000_001


async def test_a_server_that_comes_back_empty_costs_no_member(make, server: EmbeddedRegistry) -> None:  # type: ignore[no-untyped-def]
    clock = ManualClock()
    one = make()
    watcher = make(clock=clock)
    await one.register(WORKER)
    assert ids(await watcher.members()) == ["decode-0"]
    url = server.url
    os.kill(server.pid, signal.SIGKILL)
    while server.is_running():  # noqa: ASYNC110 — processes set no event
        await asyncio.sleep(0.01)
    with pytest.raises(RegistryUnavailableError, match="registry unix://"):
        await watcher.members()
    server.start()
    assert server.url == url
    assert ids(await watcher.members()) == ["decode-0"], "it has a lease's time to register again"
    await one.renew(WORKER)
    assert ids(await make().members()) == ["decode-0"], "a newcomer sees it too"
    await one.withdraw(WORKER)
    clock.advance(59)
    assert ids(await watcher.members()) == ["decode-0"]
    clock.advance(1)
    assert ids(await watcher.members()) == [], "a member that is really gone must not stay for ever"


async def test_an_unreachable_server_is_an_error_without_the_password() -> None:
    registry = Registry(RegistryConfig(url="redis://user:secret@127.0.0.1:1/0"))
    with pytest.raises(RegistryUnavailableError) as error:
        await registry.register(worker_record("decode-0", "decode"))
    assert "127.0.0.1" in str(error.value)
    assert "secret" not in str(error.value)
    await registry.close()


# --- what others do to its keys ----------------------------------------------------------------------------

_DAMAGES: dict[str, list[tuple[object, ...]]] = {
    "the index of workers is deleted": [("DEL", "workers")],
    "both indexes are deleted": [("DEL", "workers", "routers")],
    "a record is deleted": [("DEL", "worker:decode-0")],
    "an id is removed from the index": [("SREM", "workers", "decode-0")],
    "all is deleted": [("FLUSHALL",)],
    "the epoch is deleted": [("DEL", "epoch")],
    "the index has another type": [("DEL", "workers"), ("SET", "workers", "text")],
    "the record has another type": [("DEL", "worker:decode-0"), ("RPUSH", "worker:decode-0", "text")],
    "the epoch has another type": [("DEL", "epoch"), ("RPUSH", "epoch", "text")],
    "the record is text": [("SET", "worker:decode-0", "zzz, which is greater than every incarnation")],
    "the record is empty": [("SET", "worker:decode-0", "")],
    "the record is another one's": [("SET", "worker:decode-0", "00000000000000000001 no MessagePack")],
    "the scripts are forgotten": [("SCRIPT FLUSH",)],
}


async def damage(registry: Registry, commands: list[tuple[object, ...]]) -> None:
    for name, *arguments in commands:
        if arguments:  # the first is a key; of DEL all are
            num_keys = len(arguments) if name == "DEL" else 1
            keys = [f"{registry._prefix}{key}" for key in arguments[:num_keys]]
            await registry._client.execute_command(name, *keys, *arguments[num_keys:])
        else:
            await registry._client.execute_command(name)


@pytest.mark.parametrize("what", _DAMAGES)
async def test_one_renewal_each_makes_the_registry_whole(make, what: str) -> None:  # type: ignore[no-untyped-def]
    one, watcher = make(), make()
    await one.register(WORKER)
    await one.register(ROUTER)
    await watcher.members()
    await damage(one, _DAMAGES[what])
    await one.renew(WORKER)
    await one.renew(ROUTER)
    for registry in (watcher, make()):  # also a newcomer, who knows nothing from before
        members = await registry.members()
        assert (members.workers, members.routers) == ((WORKER,), (ROUTER,))
    await one.withdraw(WORKER)
    assert ids(await make().members()) == ["router-0"]


@pytest.mark.parametrize(
    "what",
    [
        "the index of workers is deleted",
        "both indexes are deleted",
        "all is deleted",
        "the epoch is deleted",
        "the index has another type",
    ],
)
async def test_until_the_renewal_the_last_view_stands(make, what: str) -> None:  # type: ignore[no-untyped-def]
    one, first, second = make(), make(), make()
    await one.register(WORKER)
    await one.register(ROUTER)
    for registry in (first, second):
        await registry.members()
    await damage(one, _DAMAGES[what])
    for registry in (first, second, first):  # nobody learns of the loss instead of another
        assert ids(await registry.members()) == ["decode-0", "router-0"]


async def test_a_lost_index_is_restored_by_the_heartbeat(make) -> None:  # type: ignore[no-untyped-def]
    one = make(heartbeat_ms=20)
    await one.register(WORKER)
    await damage(one, [("DEL", "workers")])
    await until(make(heartbeat_ms=20), ["decode-0"])


async def test_watchers_hear_of_a_repair_before_their_heartbeat(make) -> None:  # type: ignore[no-untyped-def]
    one, watcher = make(), make()
    await one.register(WORKER)
    lists = watcher.watch()
    await damage(one, [("SREM", "workers", "decode-0")])
    assert ids(await anext(lists)) == []
    await one.renew(WORKER)
    async with asyncio.timeout(20):  # less than the heartbeat
        assert ids(await anext(lists)) == ["decode-0"]
    await lists.aclose()


_ENCODED = msgspec.msgpack.encode(WORKER)
_FOREIGN: dict[str, tuple[bytes, str]] = {
    "no MessagePack": (b"0" * 20 + b"\xc1", "malformed"),
    "short": (b"1", "truncated"),
    "text": (b"%020d" % WORKER.incarnation + b"\xa5hello", "Expected `object`"),
    "no UTF-8": (b"%020d" % WORKER.incarnation + b"\x81\xa2id\xa2\xff\xfe", "UTF-8"),
    "other fields": (b"%020d" % 5 + msgspec.msgpack.encode(ROUTER), "missing required field"),
    "deeply nested": (b"0" * 20 + b"\x91" * 100_000, ""),
    "another's": (b"%020d" % WORKER.incarnation + _ENCODED, "it is the record of decode-0"),
}


@pytest.mark.parametrize("what", _FOREIGN)
async def test_what_is_no_record_is_ignored_and_named_once(
    make,  # type: ignore[no-untyped-def]
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = make()
    await registry.register(WORKER)
    value, reason = _FOREIGN[what]
    await damage(registry, [("SET", "worker:foreign", value), ("SADD", "workers", "foreign")])
    for _ in range(3):
        assert ids(await registry.members()) == ["decode-0"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "cluster.registry"]
    assert line.startswith("the registry's worker foreign is not what Leadout writes and is ignored: ")
    assert reason in line


@pytest.mark.parametrize("key", ["worker:foreign", "routers"])
async def test_a_key_of_another_type_is_ignored_and_named_once(
    make,  # type: ignore[no-untyped-def]
    key: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = make()
    await registry.register(WORKER)
    await damage(registry, [("SADD", "workers", "foreign"), ("RPUSH", key, "text")])
    for _ in range(3):
        assert ids(await registry.members()) == ["decode-0"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "cluster.registry"]
    assert line.endswith(f"{key} is not what Leadout writes and is ignored: it has another type")


@pytest.mark.parametrize("address", ["tcp://some-host:5701", "tcp://127.0.0.1", "http://127.0.0.1:80", ""])
async def test_a_worker_without_an_address_is_ignored(make, address: str) -> None:  # type: ignore[no-untyped-def]
    registry = make()
    await registry.renew(msgspec.structs.replace(WORKER, address=address))
    assert ids(await registry.members()) == []


async def test_a_changed_record_replaces_the_old_one_and_is_what_is_renewed(make) -> None:  # type: ignore[no-untyped-def]
    one, two = make(heartbeat_ms=20), make()
    record = worker_record("w0", "decode")
    await one.register(record)
    assert (await two.members()).workers == (record,)
    changed = msgspec.structs.replace(record, role="prefill", role_epoch=1)
    await one.update(changed)
    assert (await two.members()).workers == (changed,)
    remaining_ms = await one._client.pttl(one._key(record))
    while await one._client.pttl(one._key(record)) <= remaining_ms:  # until it was renewed
        remaining_ms = min(remaining_ms, await one._client.pttl(one._key(record)))
    assert (await two.members()).workers == (changed,)


async def test_a_role_that_was_written_late_is_not_taken_for_the_newer_one(make) -> None:  # type: ignore[no-untyped-def]
    one, two = make(), make()
    record = worker_record("w0", "decode")
    changed = msgspec.structs.replace(record, role="prefill", role_epoch=1)
    await one.register(changed)
    assert (await two.members()).workers == (changed,)
    await one.renew(record)  # as a write that took too long
    assert (await two.members()).workers == (changed,)


async def test_what_has_not_changed_is_not_read_again(make) -> None:  # type: ignore[no-untyped-def]
    writer, reader = make(), make()
    records = [worker_record(name, "decode") for name in ("w0", "w1")]
    for record in (*records, ROUTER):
        await writer.register(record)
    first = await reader.members()
    assert await reader.members() is first
    await writer.update(msgspec.structs.replace(records[1], role="both", role_epoch=1))
    second = await reader.members()
    assert [record.role for record in second.workers] == ["decode", "both"]
    assert second.workers[0] is first.workers[0]
    assert second.routers[0] is first.routers[0]
