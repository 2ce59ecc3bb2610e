"""Who is in the cluster: records with leases in Redis or Valkey.

Each process writes one record under its id and renews its lease; a silent process vanishes when the lease
ends. A record carries its owner's incarnation, and an older incarnation can neither replace nor remove a
newer one. The server may go away and come back empty, or lose some of its keys: everybody keeps the last view
for a lease and writes its own part again. What others have written there is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from cluster.clock import Clock, SystemClock
from cluster.config.settings import RegistryConfig
from cluster.config.values import mask_password
from cluster.errors import LeadoutError
from cluster.members import Members, RouterRecord, WorkerRecord, check_address
from cluster.problem_log import ProblemLog
from cluster.registry_scripts import DELETE, INCARNATION_DIGITS, LIST, PUT

logger = logging.getLogger(__name__)

Record = WorkerRecord | RouterRecord
_AnyRecord = TypeVar("_AnyRecord", WorkerRecord, RouterRecord)

_CALL_TIMEOUT_S = 2.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


@dataclass(eq=False, slots=True)
class _Lease:
    """One record of this process that is renewed; ``update`` replaces it."""

    record: Record
    task: asyncio.Task[None] | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # an older state must not be written last


class RegistryUnavailableError(LeadoutError):
    """The registry's server does not answer."""


class StaleIncarnationError(LeadoutError):
    """The id belongs to a newer incarnation: this process was replaced and must end."""


class Registry:
    """One process's view of the registry. Lives in one asyncio loop."""

    def __init__(self, config: RegistryConfig, clock: Clock | None = None) -> None:
        """Connects at the first call. ``clock`` is the system's unless another is given."""
        self._clock: Clock = clock or SystemClock()
        self._problems = ProblemLog(logger, self._clock)
        self._ignored: dict[str, str] = {}  # in the last list: what was not a record, and why
        self._last_read: dict[bytes, Record] = {}  # the records of the last list, by their bytes
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
        self._put = self._client.register_script(PUT)
        self._delete = self._client.register_script(DELETE)
        self._list = self._client.register_script(LIST)
        self._leases: dict[str, _Lease] = {}
        self._view = Members()
        self._epoch = b""
        self._last_contact = self._clock.monotonic()
        self._absence_counts_from = 0.0  # monotonic seconds
        self.superseded = asyncio.Event()  # set when a newer incarnation has taken over a registered id

    @property
    def seconds_since_contact(self) -> float:
        """Age of the last answer of the server, in seconds."""
        return self._clock.monotonic() - self._last_contact

    async def register(self, record: Record) -> None:
        """Write the record, and renew its lease each heartbeat until ``withdraw``.

        Raises RegistryUnavailableError and StaleIncarnationError.
        """
        lease = self._leases.get(self._key(record))
        if lease is not None:
            await self.update(record)
            return
        await self.renew(record)
        lease = self._leases[self._key(record)] = _Lease(record)
        lease.task = asyncio.create_task(self._keep_renewing(lease), name=f"lease of {record.id}")

    async def update(self, record: Record) -> None:
        """Replace the registered record of the same id by a newer state of it.

        Raises as ``register`` does; the next renewals write it all the same while the server does not answer.
        """
        lease = self._leases[self._key(record)]
        lease.record = record
        async with lease.writing:
            await self.renew(lease.record)

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
        lease = self._leases.pop(self._key(record), None)
        if lease is not None and lease.task is not None:
            lease.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await lease.task
        await self._call(
            self._delete(
                keys=[self._key(record), self._ids(record), self._channel],
                args=[_incarnation(record), record.id],
            )
        )

    async def members(self) -> Members:
        """Who is registered now, as the same object while nothing changes. Raises RegistryUnavailableError.

        After the server was away, or has lost its data, members known before are kept for one lease: they
        need that time to register again.
        """
        was_away = self.seconds_since_contact > self._heartbeat_s * 3
        epoch, workers, routers, odd_keys = await self._call(
            self._list(
                keys=[f"{self._prefix}workers", f"{self._prefix}routers", f"{self._prefix}epoch"],
                args=[self._prefix, secrets.token_hex(8)],
            )
        )
        now = self._clock.monotonic()
        if was_away or (self._epoch and epoch != self._epoch):
            self._absence_counts_from = now + self._lease_ms / 1000
        self._epoch = epoch
        known = self._view if now < self._absence_counts_from else Members()
        ignored = {key.decode(errors="replace"): "it has another type" for key in odd_keys}
        last_read, self._last_read = self._last_read, {}
        read_workers = self._read_all(workers, WorkerRecord, last_read, ignored)
        read_routers = self._read_all(routers, RouterRecord, last_read, ignored)
        members = Members(
            workers=_merge(known.workers, _newest(self._view.workers, read_workers)),
            routers=_merge(known.routers, read_routers),
        )
        if members != self._view:
            self._view = members
        for key, reason in ignored.items():
            if self._ignored.get(key) != reason:
                logger.warning("the registry's %s is not what Leadout writes and is ignored: %s", key, reason)
        self._ignored = ignored
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
                        members = await self.members()
                        retry_s = _FIRST_RETRY_S
                        self._problems.over("watch", "the registry answers again")
                        yield members
                        await self._wait_for_change(subscription)
            except (RedisError, OSError, RegistryUnavailableError) as error:
                self._problems.report(
                    "watch",
                    "the registry does not answer, the last view stands (%.1f s old): %s",
                    self.seconds_since_contact,
                    str(error) or "timeout",
                )
                await asyncio.sleep(retry_s)
                retry_s = min(_LONGEST_RETRY_S, retry_s * 2)

    async def close(self) -> None:
        """Stop renewing and disconnect. Records that were not withdrawn end with their lease."""
        renewals = [lease.task for lease in self._leases.values() if lease.task is not None]
        for renewal in renewals:
            renewal.cancel()
        await asyncio.gather(*renewals, return_exceptions=True)
        self._leases.clear()
        await self._client.aclose()

    async def _wait_for_change(self, subscription: redis.client.PubSub) -> None:
        """Until something is published, or one heartbeat."""
        give_up_at = self._clock.monotonic() + self._heartbeat_s
        while (left := give_up_at - self._clock.monotonic()) > 0:
            async with asyncio.timeout(left + _CALL_TIMEOUT_S):  # it may have to connect again
                message = await subscription.get_message(timeout=left)
            if message is not None and message["type"] == "message":
                return

    async def _keep_renewing(self, lease: _Lease) -> None:
        name = lease.record.id
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                async with lease.writing:
                    await self.renew(lease.record)
                self._problems.over(name, "the lease of %s is renewed again", name)
            except RegistryUnavailableError as error:
                self._problems.report(name, "could not renew the lease of %s: %s", name, error)
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
        self._last_contact = self._clock.monotonic()
        return result

    def _read_all(
        self,
        entries: list[bytes],
        kind: type[_AnyRecord],
        last_read: dict[bytes, Record],
        ignored: dict[str, str],
    ) -> list[_AnyRecord]:
        """The records among ``entries`` (id, value, id, value, …); notes in ``ignored`` what is none.

        What has not changed since the last list is not decoded again.
        """
        records: list[_AnyRecord] = []
        for record_id, value in zip(entries[::2], entries[1::2], strict=True):
            record = last_read.get(value)
            name = record_id.decode(errors="replace")
            try:
                if not isinstance(record, kind) or record.id != name:
                    record = _read(name, value, kind)
            except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
                ignored[f"{_kind(kind)} {name}"] = str(error)
            else:
                self._last_read[value] = record
                records.append(record)
        return records

    @property
    def _channel(self) -> str:
        return f"{self._prefix}changes"

    def _key(self, record: Record) -> str:
        return f"{self._prefix}{_kind(type(record))}:{record.id}"

    def _ids(self, record: Record) -> str:
        return f"{self._prefix}{_kind(type(record))}s"


def _kind(record: type[Record]) -> str:
    return "worker" if record is WorkerRecord else "router"


def _incarnation(record: Record) -> str:
    return f"{record.incarnation:0{INCARNATION_DIGITS}d}"


def _read(name: str, value: bytes, kind: type[_AnyRecord]) -> _AnyRecord:
    """The record of ``name`` in the registry's form. Raises ValueError, RecursionError where it is none."""
    record = msgspec.msgpack.decode(value[INCARNATION_DIGITS:], type=kind)
    if record.id != name or not value.startswith(_incarnation(record).encode()):
        raise ValueError(f"it is the record of {record.id}, incarnation {record.incarnation}")
    if isinstance(record, WorkerRecord):
        check_address(record.address)
    return record


def _newest(seen: tuple[WorkerRecord, ...], read: list[WorkerRecord]) -> list[WorkerRecord]:
    """What was read, but no role older than one seen: a write that took too long may come after a newer one.

    The next renewal puts that right on the server.
    """
    by_id = {record.id: record for record in seen}
    newest = []
    for record in read:
        known = by_id.get(record.id, record)
        is_older = known.incarnation == record.incarnation and known.role_epoch > record.role_epoch
        newest.append(known if is_older else record)
    return newest


def _merge(known: tuple[_AnyRecord, ...], current: list[_AnyRecord]) -> tuple[_AnyRecord, ...]:
    by_id = {record.id: record for record in known}
    by_id.update({record.id: record for record in current})
    return cast("tuple[_AnyRecord, ...]", tuple(by_id[record_id] for record_id in sorted(by_id)))
