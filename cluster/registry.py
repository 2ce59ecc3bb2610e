"""Who is in the cluster: records with leases in Redis or Valkey.

Each process writes one record under its id and renews its lease; a silent process vanishes when the lease
ends. A record carries its owner's incarnation, and an older incarnation can neither replace nor remove a
newer one. The server may go away and come back empty: everybody keeps the last view and re-registers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar, cast

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from cluster.config import RegistryConfig
from cluster.config_values import mask_password
from cluster.members import Members, RouterRecord, WorkerRecord

logger = logging.getLogger(__name__)

Record = WorkerRecord | RouterRecord
_AnyRecord = TypeVar("_AnyRecord", WorkerRecord, RouterRecord)

_CALL_TIMEOUT_S = 2.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0
_INCARNATION_DIGITS = 20  # zero-padded, so that strings compare like the numbers, which Lua cannot hold

# KEYS: record, ids, channel. ARGV: incarnation, value, lease in ms, id. 0: a newer incarnation holds the id.
_PUT = f"""
local current = redis.call('GET', KEYS[1])
if current and string.sub(current, 1, {_INCARNATION_DIGITS}) > ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if current ~= ARGV[2] then
  redis.call('SADD', KEYS[2], ARGV[4])
  redis.call('PUBLISH', KEYS[3], ARGV[4])
end
return 1
"""
# KEYS: record, ids, channel. ARGV: incarnation, id.
_DELETE = f"""
local current = redis.call('GET', KEYS[1])
if not current or string.sub(current, 1, {_INCARNATION_DIGITS}) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
redis.call('PUBLISH', KEYS[3], ARGV[2])
return 1
"""
# KEYS: ids of workers, ids of routers, epoch. ARGV: key prefix, a new epoch. Drops ids whose lease ended.
_LIST = """
redis.call('SET', KEYS[3], ARGV[2], 'NX')
local result = {redis.call('GET', KEYS[3])}
for kind = 1, 2 do
  local values = {}
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[kind])) do
    local value = redis.call('GET', ARGV[1] .. (kind == 1 and 'worker:' or 'router:') .. id)
    if value then table.insert(values, value) else redis.call('SREM', KEYS[kind], id) end
  end
  table.insert(result, values)
end
return result
"""


class RegistryUnavailableError(Exception):
    """The registry's server does not answer."""


class StaleIncarnationError(Exception):
    """The id belongs to a newer incarnation: this process was replaced and must end."""


class Registry:
    """One process's view of the registry. Lives in one asyncio loop."""

    def __init__(self, config: RegistryConfig) -> None:
        """Connects at the first call."""
        self._lease_ms = config.lease_ms
        self._heartbeat_s = config.heartbeat_ms / 1000
        self._shown_url = mask_password(config.url)
        # No socket timeout: redis-py would send with asyncio.wait_for, and in Python 3.11 that loses a
        # cancellation which comes when the send is done: the task goes on. Calls are bounded here instead.
        self._client = redis.Redis.from_url(
            config.url, socket_timeout=None, socket_connect_timeout=_CALL_TIMEOUT_S
        )
        # The braces put all keys of one deployment into one slot of a Redis cluster.
        self._prefix = f"{{{config.namespace}}}:"
        self._put = self._client.register_script(_PUT)
        self._delete = self._client.register_script(_DELETE)
        self._list = self._client.register_script(_LIST)
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._view = Members()
        self._epoch = b""
        self._last_contact = time.monotonic()
        self._absence_counts_from = 0.0  # monotonic seconds
        self.superseded = asyncio.Event()  # set when a newer incarnation has taken over a registered id

    @property
    def seconds_since_contact(self) -> float:
        """Age of the last answer of the server, in seconds."""
        return time.monotonic() - self._last_contact

    async def register(self, record: Record) -> None:
        """Write the record, and renew its lease each heartbeat until ``withdraw``.

        Raises RegistryUnavailableError and StaleIncarnationError.
        """
        await self.renew(record)
        key = self._key(record)
        if key not in self._renewals:
            self._renewals[key] = asyncio.create_task(
                self._keep_renewing(record), name=f"lease of {record.id}"
            )

    async def renew(self, record: Record) -> None:
        """Write the record with a fresh lease, once. Raises as ``register`` does."""
        incarnation = _incarnation(record)
        value = incarnation.encode() + msgspec.msgpack.encode(record)
        accepted = await self._call(
            self._put(
                keys=[self._key(record), self._ids(record), self._channel],
                args=[incarnation, value, self._lease_ms, record.id],
            )
        )
        if not accepted:
            raise StaleIncarnationError(
                f"the id {record.id!r} is registered by a newer process; give each process its own id"
            )

    async def withdraw(self, record: Record) -> None:
        """Remove the record, unless a newer incarnation has replaced it. Raises RegistryUnavailableError."""
        renewal = self._renewals.pop(self._key(record), None)
        if renewal is not None:
            renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewal
        await self._call(
            self._delete(
                keys=[self._key(record), self._ids(record), self._channel],
                args=[_incarnation(record), record.id],
            )
        )

    async def members(self) -> Members:
        """Who is registered now. Raises RegistryUnavailableError.

        After the server was away, or has lost its data, members known before are kept for one lease: they
        need that time to register again.
        """
        was_away = self.seconds_since_contact > self._heartbeat_s * 3
        epoch, workers, routers = await self._call(
            self._list(
                keys=[f"{self._prefix}workers", f"{self._prefix}routers", f"{self._prefix}epoch"],
                args=[self._prefix, secrets.token_hex(8)],
            )
        )
        now = time.monotonic()
        if was_away or (self._epoch and epoch != self._epoch):
            self._absence_counts_from = now + self._lease_ms / 1000
        self._epoch = epoch
        known = self._view if now < self._absence_counts_from else Members()
        self._view = Members(
            workers=_merge(known.workers, _decode(workers, WorkerRecord)),
            routers=_merge(known.routers, _decode(routers, RouterRecord)),
        )
        return self._view

    async def watch(self) -> AsyncIterator[Members]:
        """The members now, then at each change and at least each heartbeat. Ends only by cancellation.

        While the server is away nothing is yielded: the last view stands.
        """
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                async with self._client.pubsub() as subscription:
                    async with asyncio.timeout(_CALL_TIMEOUT_S):
                        await subscription.subscribe(self._channel)
                    while True:
                        yield await self.members()
                        retry_s = _FIRST_RETRY_S
                        await self._wait_for_change(subscription)
            except (RedisError, OSError, RegistryUnavailableError) as error:
                logger.warning(
                    "the registry does not answer, the last view stands (%.1f s old): %s",
                    self.seconds_since_contact,
                    str(error) or "timeout",
                )
                await asyncio.sleep(retry_s)
                retry_s = min(_LONGEST_RETRY_S, retry_s * 2)

    async def close(self) -> None:
        """Stop renewing and disconnect. Records that were not withdrawn end with their lease."""
        for renewal in self._renewals.values():
            renewal.cancel()
        await asyncio.gather(*self._renewals.values(), return_exceptions=True)
        self._renewals.clear()
        await self._client.aclose()

    async def _wait_for_change(self, subscription: redis.client.PubSub) -> None:
        """Until something is published, or one heartbeat."""
        give_up_at = time.monotonic() + self._heartbeat_s
        while (left := give_up_at - time.monotonic()) > 0:
            async with asyncio.timeout(left + _CALL_TIMEOUT_S):  # it may have to connect again
                message = await subscription.get_message(timeout=left)
            if message is not None and message["type"] == "message":
                return

    async def _keep_renewing(self, record: Record) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self.renew(record)
            except RegistryUnavailableError as error:
                logger.warning("could not renew the lease of %s: %s", record.id, error)
            except StaleIncarnationError as error:
                logger.error("%s", error)
                self.superseded.set()
                return

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                result = await call
        except TimeoutError as error:
            message = f"registry {self._shown_url}: no answer within {_CALL_TIMEOUT_S:g} s"
            raise RegistryUnavailableError(message) from error
        except (RedisError, OSError) as error:
            raise RegistryUnavailableError(f"registry {self._shown_url}: {error}") from error
        self._last_contact = time.monotonic()
        return result

    @property
    def _channel(self) -> str:
        return f"{self._prefix}changes"

    def _key(self, record: Record) -> str:
        return f"{self._prefix}{_kind(record)}:{record.id}"

    def _ids(self, record: Record) -> str:
        return f"{self._prefix}{_kind(record)}s"


def _kind(record: Record) -> str:
    return "worker" if isinstance(record, WorkerRecord) else "router"


def _incarnation(record: Record) -> str:
    return f"{record.incarnation:0{_INCARNATION_DIGITS}d}"


def _decode(values: list[bytes], kind: type[_AnyRecord]) -> list[_AnyRecord]:
    records = []
    for value in values:
        try:
            records.append(msgspec.msgpack.decode(value[_INCARNATION_DIGITS:], type=kind))
        except msgspec.DecodeError as error:  # another version of Leadout
            logger.warning("ignored a registration that cannot be read: %s", error)
    return records


def _merge(known: tuple[_AnyRecord, ...], current: list[_AnyRecord]) -> tuple[_AnyRecord, ...]:
    by_id = {record.id: record for record in known}
    by_id.update({record.id: record for record in current})
    return cast("tuple[_AnyRecord, ...]", tuple(by_id[record_id] for record_id in sorted(by_id)))
