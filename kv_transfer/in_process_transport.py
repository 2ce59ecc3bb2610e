"""A transport between workers of one process: plain memory copies on each transport's own thread.

Same interface and error behaviour as the NIXL transport, for tests and for workers that share a process.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cluster.kv_layout import KvLayout
from cluster.members import TransportEndpoint, WorkerRecord
from kv_transfer.descriptors import BlockCopy, check_block_ids, check_remote_copies, plan_block_copies
from kv_transfer.peer_table import PeerTable, check_peer_record, describe
from kv_transfer.poller import Poller
from kv_transfer.transport import (
    NotificationHandler,
    Peer,
    PeerInfo,
    TransferError,
    TransferStats,
    TransportCounters,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class InProcessNetwork:
    """The transports that can reach each other, by agent name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports: dict[str, InProcessTransport] = {}

    def join(self, transport: InProcessTransport) -> None:
        """Make a transport reachable. Raises ``ValueError`` if its agent name is taken."""
        name = transport.endpoint.agent_name
        with self._lock:
            if name in self._transports:
                raise ValueError(f"the agent name {name!r} is already in use on this network")
            self._transports[name] = transport

    def leave(self, transport: InProcessTransport) -> None:
        """Make a transport unreachable. Unknown ones are ignored."""
        name = transport.endpoint.agent_name
        with self._lock:
            if self._transports.get(name) is transport:
                del self._transports[name]

    def find(self, agent_name: str) -> InProcessTransport | None:
        """The transport of that name; None if it has left."""
        with self._lock:
            return self._transports.get(agent_name)


@dataclass(eq=False, slots=True)
class _Connection:
    peer: Peer
    endpoint: TransportEndpoint
    info: PeerInfo
    writes: list[_DelayedWrite] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _DelayedWrite:
    copies: list[BlockCopy]
    posted_at: float
    due_at: float
    future: Future[TransferStats]


class InProcessTransport:
    """See ``kv_transfer.transport.Transport``. The cache is ``num_blocks`` blocks at ``base_address``.

    - ``write_delay_s``: how long each write stays in flight before its bytes are copied.
    - ``fail_write``: asked with the peer and the number of the write, from 0; True makes the write fail after
      half of its copies, as a broken link would. The peer is dropped, as with every failed write.
    - ``fail_notify``: likewise for notifications.

    Raises ``ValueError`` for arguments out of range or an agent name in use.
    """

    def __init__(
        self,
        network: InProcessNetwork,
        *,
        agent_name: str,
        base_address: int,
        layout: KvLayout,
        num_blocks: int,
        local_id: tuple[str, int] | None = None,
        write_delay_s: float = 0.0,
        fail_write: Callable[[Peer, int], bool] | None = None,
        fail_notify: Callable[[Peer, int], bool] | None = None,
    ) -> None:
        if not agent_name:
            raise ValueError("agent_name must not be empty")
        if base_address <= 0 or num_blocks < 1:
            raise ValueError(
                f"a KV cache needs an address and at least one block, got address {base_address} "
                f"and {num_blocks} blocks"
            )
        if write_delay_s < 0:
            raise ValueError(f"write_delay_s must not be negative, got {write_delay_s}")
        self._network = network
        self._layout = layout
        self._local_peer = Peer(*local_id) if local_id is not None else None
        self._write_delay_s = write_delay_s
        self._fail_write = fail_write
        self._fail_notify = fail_notify
        self._endpoint = TransportEndpoint(
            kind="in_process",
            agent_name=agent_name,
            metadata=b"",
            base_address=base_address,
            num_blocks=num_blocks,
        )
        self._handler: NotificationHandler | None = None
        self._peers: PeerTable[_Connection] = PeerTable()
        self._counters = TransportCounters()
        self._num_writes = 0
        self._num_notifications = 0
        self._expected: set[str] = set()
        self._open = True
        self._memory = threading.Lock()  # held by whoever copies into this cache
        network.join(self)
        self._poller = Poller(
            f"in-process-{agent_name}", poll=self._poll, on_stop=self._shut_down, on_crash=self._crash
        )
        self._poller.start()

    @property
    def endpoint(self) -> TransportEndpoint:
        """What peers need in order to write here."""
        return self._endpoint

    def on_notification(self, handler: NotificationHandler) -> None:
        """Set the handler of incoming notifications. Until then they are dropped and counted."""
        self._handler = handler

    def add_peer(self, record: WorkerRecord) -> Future[None]:
        """Connect to a transport of the same network."""
        future: Future[None] = Future()
        return self._submit(future, lambda: self._connect(record, future))

    def remove_peer(self, peer: Peer) -> Future[None]:
        """Fail the writes in flight to ``peer`` and forget it."""
        future: Future[None] = Future()

        def disconnect() -> None:
            self._disconnect(peer, "removed")
            future.set_result(None)

        return self._submit(future, disconnect)

    def write_blocks(
        self, peer: Peer, local_block_ids: Sequence[int], remote_block_ids: Sequence[int]
    ) -> Future[TransferStats]:
        """Copy local blocks into the peer's, pairwise.

        Raises ``ValueError`` for unequal lengths, ids out of range, or a remote block named twice.
        """
        check_block_ids(local_block_ids, self._endpoint.num_blocks, side="local")
        connection = self._peers.get(peer)
        if connection is not None:
            check_block_ids(remote_block_ids, connection.endpoint.num_blocks, side="remote")
        copies = plan_block_copies(
            local_block_ids,
            remote_block_ids,
            block_bytes=self._layout.block_bytes,
            local_base=self._endpoint.base_address,
            remote_base=0,  # relative: the peer may not be known yet
        )
        future: Future[TransferStats] = Future()
        if not copies:
            future.set_result(TransferStats(num_bytes=0, num_descriptors=0, duration_ms=0.0))
            return future
        return self._submit(future, lambda: self._post(peer, copies, future))

    def notify(self, peer: Peer, payload: bytes) -> Future[None]:
        """Queue ``payload`` for the peer's thread."""
        future: Future[None] = Future()
        return self._submit(future, lambda: self._send(peer, payload, future))

    def expect_traffic(self, key: str) -> None:
        """Nothing to do: writers and notifications wake this transport's thread themselves."""
        self._expected.add(key)

    def stop_expecting(self, key: str) -> None:
        """The counterpart of ``expect_traffic``."""
        self._expected.discard(key)

    def peers(self) -> tuple[PeerInfo, ...]:
        """The current peers, in the order they were added."""
        return tuple(
            replace(connection.info, num_writes_in_flight=len(connection.writes))
            for connection in self._peers.snapshot().values()
        )

    def counters(self) -> TransportCounters:
        """What this transport has done so far."""
        return self._counters

    def close(self) -> None:
        """Fail what is outstanding, leave the network, end the thread. Idempotent.

        When it returns, nobody writes into this cache any more.
        """
        with self._memory:
            self._network.leave(self)
        self._poller.stop()

    def _receive(self, sender: str, payload: bytes) -> bool:
        """Take a notification from another transport's thread. False if this transport is closed."""
        return self._poller.submit(lambda: self._deliver(sender, payload))

    def _submit(self, future: Future[_T], action: Callable[[], None]) -> Future[_T]:
        """Run ``action`` on this transport's thread; what it raises becomes the future's exception."""

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if not self._open:
                    raise TransferError("the transport has stopped")
                action()
            except (TransferError, ValueError) as error:
                future.set_exception(error)

        if not self._poller.submit(run):
            future.set_exception(TransferError("the transport is closed"))
        return future

    def _connect(self, record: WorkerRecord, future: Future[None]) -> None:
        check_peer_record(record, kind="in_process", layout=self._layout, local_peer=self._local_peer)
        peer = Peer(record.id, record.incarnation)
        current = self._peers.incarnation_of(record.id)
        if current == peer:
            future.set_result(None)
            return
        if current is not None:
            if current.incarnation > peer.incarnation:
                raise TransferError(
                    f"{describe(peer)} is older than {describe(current)}, which is already a peer"
                )
            self._disconnect(current, f"replaced by incarnation {peer.incarnation}")
        endpoint = record.endpoint
        if self._network.find(endpoint.agent_name) is None:
            raise TransferError(f"cannot connect to {describe(peer)}: no agent {endpoint.agent_name!r} here")
        info = PeerInfo(peer, endpoint.agent_name, endpoint.num_blocks, True, 0.0, 0.0, 0.0, 0)
        self._peers.add(peer, _Connection(peer, endpoint, info))
        self._count(peers_added=1)
        future.set_result(None)

    def _disconnect(self, peer: Peer, reason: str) -> None:
        connection = self._peers.get(peer)
        if connection is None:
            return
        self._peers.remove(peer, reason)
        for write in connection.writes:
            self._count(writes_failed=1)
            write.future.set_exception(TransferError(f"{describe(peer)}: {reason}"))
        connection.writes.clear()

    def _post(self, peer: Peer, copies: list[BlockCopy], future: Future[TransferStats]) -> None:
        connection = self._peers.require(peer)
        check_remote_copies(copies, connection.endpoint.num_blocks, block_bytes=self._layout.block_bytes)
        now = time.perf_counter()
        self._count(writes_posted=1)
        connection.writes.append(_DelayedWrite(copies, now, now + self._write_delay_s, future))

    def _poll(self) -> float | None:
        self._count(polls=1)
        next_due: float | None = None
        for connection in self._peers.snapshot().values():
            while connection.writes and connection.writes[0].due_at <= time.perf_counter():
                self._copy(connection, connection.writes[0])
            if connection.writes:
                due = connection.writes[0].due_at
                next_due = due if next_due is None else min(next_due, due)
        return None if next_due is None else max(next_due - time.perf_counter(), 0.0)

    def _copy(self, connection: _Connection, write: _DelayedWrite) -> None:
        peer, number = connection.peer, self._num_writes
        self._num_writes += 1
        fails = self._fail_write is not None and self._fail_write(peer, number)
        copies = write.copies[: len(write.copies) // 2] if fails else write.copies
        if not self._copy_all(connection.endpoint, copies):
            self._fail(peer, "its transport is closed")
            return
        if fails:
            self._fail(peer, "a write failed, as asked for")
            return
        connection.writes.remove(write)
        duration_s = time.perf_counter() - write.posted_at
        num_bytes = sum(copy.num_bytes for copy in copies)
        self._count(
            writes_completed=1,
            bytes_written=num_bytes,
            descriptors_written=len(copies),
            write_seconds=duration_s,
        )
        write.future.set_result(TransferStats(num_bytes, len(copies), duration_s * 1000))

    def _copy_all(self, endpoint: TransportEndpoint, copies: list[BlockCopy]) -> bool:
        """False if the target has left the network: its memory may be gone."""
        target = self._network.find(endpoint.agent_name)
        if target is None:
            return False
        with target._memory:
            if self._network.find(endpoint.agent_name) is not target:
                return False
            for copy in copies:
                ctypes.memmove(
                    endpoint.base_address + copy.remote_address, copy.local_address, copy.num_bytes
                )
        return True

    def _send(self, peer: Peer, payload: bytes, future: Future[None]) -> None:
        connection = self._peers.require(peer)
        number = self._num_notifications
        self._num_notifications += 1
        receiver = self._network.find(connection.endpoint.agent_name)
        fails = self._fail_notify is not None and self._fail_notify(peer, number)
        if fails or receiver is None or not receiver._receive(self._endpoint.agent_name, payload):
            reason = "a notification failed, as asked for" if fails else "its transport is closed"
            self._fail(peer, reason)
            raise TransferError(f"{describe(peer)}: {reason}")
        self._count(notifications_sent=1)
        future.set_result(None)

    def _deliver(self, sender: str, payload: bytes) -> None:
        known = any(
            connection.endpoint.agent_name == sender for connection in self._peers.snapshot().values()
        )
        if not known or self._handler is None:
            self._count(notifications_dropped=1)
            return
        self._count(notifications_received=1)
        try:
            self._handler(payload)
        except Exception:
            logger.exception("the handler of a notification from %s failed", sender)

    def _fail(self, peer: Peer, reason: str) -> None:
        self._count(peers_failed=1)
        self._disconnect(peer, reason)

    def _crash(self, error: BaseException) -> None:
        logger.error("the in-process transport stopped: %s", error)
        self._network.leave(self)
        self._shut_down()

    def _shut_down(self) -> None:
        self._open = False
        for peer in list(self._peers.snapshot()):
            self._disconnect(peer, "this transport is closed")

    def _count(self, **increments: float) -> None:
        values = {name: getattr(self._counters, name) + step for name, step in increments.items()}
        self._counters = replace(self._counters, **values)
