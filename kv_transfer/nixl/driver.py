"""The part of the NIXL transport that owns the agent. One thread runs it: nothing here is thread-safe."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
from msgspec.structs import replace

from cluster.load import LinkReport, TransferCounters
from cluster.members import Peer, WorkerRecord
from cluster.problem_log import ProblemLog
from kv_transfer.layout_planner import CacheShape, Int64s
from kv_transfer.nixl.agent import (
    AgentSettings,
    create_agent,
    forget_remote_agent,
    load_remote_agent,
    prepare_write,
)
from kv_transfer.nixl.connection import Connection, Drain, Write, WritePurpose
from kv_transfer.nixl.notifications import receive_payloads, send_payload, send_wake_up
from kv_transfer.peer_table import PeerTable, describe
from kv_transfer.transport import (
    NotificationHandler,
    TransferError,
    TransferStats,
    WriteAbandonedError,
)

logger = logging.getLogger(__name__)

_WARM_UP_TIMEOUT_S = 2.0  # then a peer counts as added, though its path is not warm
_PROBE_BYTES = 4 << 20
_PROBE_MAX_DESCRIPTORS = 256
_LINK_SAMPLE_BYTES = 1 << 20  # smaller writes say more about latency than about the link
_LINK_SAMPLE_WEIGHT = 0.2
_DRAIN_S, _DRAIN_POLLS = 0.05, 50  # both: a process that was frozen meanwhile has not polled


class NixlDriver:
    """One NIXL agent with one registered KV cache, its peers, and the writes in flight.

    Raises ``TransportUnavailableError`` where NIXL cannot run. Methods raise ``TransferError``; an error of a
    peer's connection drops that peer.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        block_bytes: int,
        write_timeout_s: float,
    ) -> None:
        self._settings = settings
        self._block_bytes = block_bytes
        self._write_timeout_s = write_timeout_s
        self._agent, self._registration = create_agent(settings)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self.peers: PeerTable[Connection] = PeerTable()
        self.handler: NotificationHandler | None = None
        self.last_activity = time.perf_counter()
        self._counters = TransferCounters()
        self._polls = 0
        self._writes: set[Write] = set()
        self._closing: dict[Peer, Connection] = {}  # no longer peers, but writes of blocks are not over
        self._drains: list[Drain] = []
        self._problems = ProblemLog(logger)
        self._unreleased: list[Any] = []  # handles of writes that NIXL would not cancel yet

    @property
    def counters(self) -> TransferCounters:
        """What was done so far. Any thread may read it."""
        return replace(self._counters, polls_total=self._polls)

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a write, a warm-up or a drain."""
        return bool(self._drains) or any(not write.is_abandoned for write in self._writes)

    def connect(self, record: WorkerRecord, future: Future[None]) -> None:
        """Load the peer and start to warm its path up. ``future`` completes when it is warm."""
        peer = Peer(record.id, record.incarnation)
        current = self.peers.incarnation_of(record.id)
        if current == peer:
            connection = self.peers.require(peer)
            if connection.waiters:
                connection.waiters.append(future)
            else:
                future.set_result(None)
            return
        if current is not None:
            if current.incarnation > peer.incarnation:
                raise TransferError(
                    f"{describe(peer)} is older than {describe(current)}, which is already a peer"
                )
            self._drop(self.peers.require(current), f"replaced by incarnation {peer.incarnation}")
        for closing in [one for one in self._closing.values() if one.peer.worker_id == record.id]:
            if closing.peer == peer:
                raise TransferError(f"a write to {describe(peer)} is not over: it may still land")
            self._drop(closing, f"replaced by incarnation {peer.incarnation}")
        (endpoint,) = record.endpoints  # its layout is ours, of one rank
        if any(other.endpoint.agent_name == endpoint.agent_name for other in self.peers.snapshot().values()):
            raise TransferError(f"another peer already uses the agent name {endpoint.agent_name!r}")
        started_at = self.last_activity = time.perf_counter()
        try:
            load_remote_agent(self._agent, endpoint)
            send_wake_up(self._agent, endpoint.agent_name)
        except Exception as error:
            forget_remote_agent(self._agent, endpoint.agent_name)
            raise TransferError(f"cannot connect to {describe(peer)}: {error}") from error
        link = LinkReport(peer=peer.worker_id, probe_gbps=0.0, gbps=0.0)
        cache = CacheShape(record.kv_layout, endpoint.num_blocks)
        connection = Connection(peer, endpoint, cache, link, started_at, waiters=[future])
        self.peers.add(peer, connection)
        self._count(peers_added_total=1)
        self._post("warm_up", connection, self._null_block_copies(1), None)

    def remove(self, peer: Peer, future: Future[None]) -> None:
        """Forget ``peer``, known or not. ``future`` completes when nothing can land any more, here or there.

        NIXL cannot recall a write: UCX goes on sending what was posted even after its endpoint was closed. So
        writes of blocks that are in flight end first: they land, break with the link, or run out of time.
        Those that have run out of time are not waited for: their peer's lease has ended too.
        """
        connection = self.peers.get(peer) or self._closing.get(peer)
        if connection is None:
            self._drain(future)
            return
        connection.leavers.append(future)
        self._close(connection, "removed")

    def write(self, peer: Peer, copies: Int64s, future: Future[TransferStats]) -> None:
        """Post one write of ``copies``, as in ``RankCopies``."""
        connection = self.peers.require(peer)
        self._post("blocks", connection, copies, future)

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Hand a notification to the network. A dead peer may show only at the next call."""
        connection = self.peers.require(peer)
        self.last_activity = time.perf_counter()
        try:
            send_payload(self._agent, connection.endpoint.agent_name, payload)
        except Exception as error:
            raise self._fail(connection, f"a notification could not be sent: {error}") from error
        self._count(notifications_sent_total=1)

    def poll(self) -> None:
        """Progress the network once: finish writes, enforce deadlines, hand out notifications."""
        self._polls += 1
        self._receive_notifications()
        for write in list(self._writes):
            if write in self._writes:  # the failure of another write may have taken it down
                self._check(write)
        for connection in self.peers.snapshot().values():
            if connection.waiters and time.perf_counter() - connection.started_at > _WARM_UP_TIMEOUT_S:
                message = "%s did not answer within %.1f s; going on without a warm path to it"
                name = describe(connection.peer)
                self._problems.report(("cold", connection.peer), message, name, _WARM_UP_TIMEOUT_S)
                _complete(connection.waiters)
        for connection in list(self._closing.values()):
            self._finish_closing(connection)
        while self._drains and self._is_over(self._drains[0]):
            self._drains.pop(0).future.set_result(None)

    def shut_down(self) -> None:
        """Drop all peers and release the agent."""
        for connection in [*self.peers.snapshot().values(), *self._closing.values()]:
            self._drop(connection, "this transport is closed")
        for drain in self._drains:
            drain.future.set_exception(TransferError("this transport is closed"))
        self._drains.clear()
        self._release_left_over()
        try:
            self._agent.deregister_memory(self._registration)
        except Exception:
            logger.warning("NIXL could not deregister the KV cache", exc_info=True)
        self._agent = self._registration = None

    def _post(
        self,
        purpose: WritePurpose,
        connection: Connection,
        copies: Int64s,
        future: Future[TransferStats] | None,
    ) -> None:
        posted_at = self.last_activity = time.perf_counter()
        handle = None
        try:
            handle = prepare_write(self._agent, self._settings, connection.endpoint, copies)
            state = self._agent.transfer(handle)
        except Exception as error:
            if handle is not None:
                self._release(handle)
            self._fail(connection, f"a write could not be posted: {error}", future)
            return
        num_bytes = int(copies[:, 2].sum())
        write = Write(purpose, connection, handle, num_bytes, len(copies), posted_at, future)
        self._writes.add(write)
        connection.writes.add(write)
        self._settle(write, state)

    def _check(self, write: Write) -> None:
        try:
            state = self._agent.check_xfer_state(write.handle)
        except Exception as error:
            self._fail(write.connection, f"a write failed: {error}")
            return
        self._settle(write, state)

    def _settle(self, write: Write, state: str) -> None:
        """Act on the state NIXL gave for ``write``: "DONE", "PROC" or "ERR"."""
        now = time.perf_counter()
        waited_s = now - write.posted_at
        if state == "DONE":
            self.last_activity = now
            self._retire(write)
            if not write.is_abandoned:
                self._finish(write, waited_s)
        elif state != "PROC":
            self._fail(write.connection, f"a write failed in state {state}")
        elif waited_s > self._write_timeout_s and not write.is_abandoned:
            self._abandon(write)

    def _finish(self, write: Write, duration_s: float) -> None:
        connection = write.connection
        if write.purpose == "warm_up":
            connection.connect_ms = (time.perf_counter() - connection.started_at) * 1000
            num_copies = min(max(_PROBE_BYTES // self._block_bytes, 1), _PROBE_MAX_DESCRIPTORS)
            self._post("probe", connection, self._null_block_copies(num_copies), None)
            return
        gbps = write.num_bytes / max(duration_s, 1e-9) / 1e9
        if write.purpose == "probe":
            connection.link = replace(connection.link, probe_gbps=gbps, gbps=gbps)
            name, connect_ms = describe(connection.peer), connection.connect_ms
            logger.info("connected to %s in %.1f ms, %.2f GB/s", name, connect_ms, gbps)
            _complete(connection.waiters)
            return
        if write.num_bytes >= _LINK_SAMPLE_BYTES:
            known = connection.link.gbps or gbps
            connection.link = replace(connection.link, gbps=known + _LINK_SAMPLE_WEIGHT * (gbps - known))
        self._count(
            writes_total=1,
            bytes_total=write.num_bytes,
            descriptors_total=write.num_descriptors,
            write_seconds_total=duration_s,
        )
        assert write.future is not None
        write.future.set_result(TransferStats(write.num_bytes, write.num_descriptors, duration_s * 1000))

    def _fail(
        self, connection: Connection, reason: str, future: Future[TransferStats] | None = None
    ) -> TransferError:
        """Drop a peer whose connection does not work. ``future`` belongs to a write that was never posted."""
        peer = connection.peer
        if connection in (self.peers.get(peer), self._closing.get(peer)):
            self._note_failed(peer, reason)
            self._drop(connection, reason)
        if future is not None:
            self._count(writes_failed_total=1)
            future.set_exception(TransferError(f"{describe(peer)}: {reason}"))
        return TransferError(f"{describe(peer)}: {reason}")

    def _note_failed(self, peer: Peer, reason: str) -> None:
        self._problems.report(("failed", peer), "dropping peer %s: %s", describe(peer), reason)
        self._count(peers_failed_total=1)

    def _abandon(self, write: Write) -> None:
        """Fail a write that has run out of time. It may still land, so it is watched until it is over."""
        connection, write.is_abandoned = write.connection, True
        reason = f"a write of {write.num_bytes} bytes was not done after {self._write_timeout_s} s"
        if connection.peer not in self._closing:
            self._note_failed(connection.peer, reason)
        if write.future is not None:
            self._count(writes_failed_total=1)
            write.future.set_exception(
                WriteAbandonedError(f"{describe(connection.peer)}: {reason}", connection.over)
            )
        self._close(connection, reason)

    def _close(self, connection: Connection, reason: str) -> None:
        """Accept no more writes to a peer; forget its agent when those of blocks in flight are over."""
        if connection.peer not in self._closing:
            self.peers.remove(connection.peer, reason)
            self._closing[connection.peer] = connection
            _fail_all(connection.waiters, TransferError(f"{describe(connection.peer)}: {reason}"))
        self._finish_closing(connection, reason)

    def _finish_closing(self, connection: Connection, reason: str = "removed") -> None:
        if not any(write.purpose == "blocks" for write in connection.writes):
            self._drop(connection, reason)
        elif all(write.is_abandoned for write in connection.writes if write.purpose == "blocks"):
            for leaver in connection.leavers:
                self._drain(leaver)
            connection.leavers.clear()

    def _drop(self, connection: Connection, reason: str) -> None:
        """Close a peer's endpoint, forget its agent, and fail what is in flight to it."""
        peer = connection.peer
        if self._closing.pop(peer, None) is None:
            self.peers.remove(peer, reason)
        writes = list(connection.writes)
        for write in writes:
            self._retire(write)
        forget_remote_agent(self._agent, connection.endpoint.agent_name)
        self._release_left_over()
        # Only now: whoever hears of a failed write may reuse the blocks it was read from.
        error = TransferError(f"{describe(peer)}: {reason}")
        for write in writes:
            if write.future is not None and not write.is_abandoned:
                self._count(writes_failed_total=1)
                write.future.set_exception(error)
        _fail_all(connection.waiters, error)
        for leaver in connection.leavers:
            self._drain(leaver)
        connection.leavers.clear()
        connection.over.set_result(None)

    def _drain(self, future: Future[None]) -> None:
        """Complete ``future`` once the bytes that a dead peer had sent have been taken off the network.

        UCX reads a socket for as long as it is open, whether the peer is known here or not, and what a dead
        process had written to it still comes. NIXL cannot say when that is over, so this polls for a while.
        """
        self.last_activity = time.perf_counter()
        self._drains.append(Drain(future, self.last_activity + _DRAIN_S, self._polls + _DRAIN_POLLS))

    def _receive_notifications(self) -> None:
        arrived = receive_payloads(self._agent)
        if not arrived:
            return
        self.last_activity = time.perf_counter()
        names = {connection.endpoint.agent_name for connection in self.peers.snapshot().values()}
        for sender, payloads in arrived.items():
            if not payloads:
                continue
            if sender not in names or self.handler is None:
                message = "dropped %d notifications from agent %s"
                self._problems.report(("unknown agent", sender), message, len(payloads), sender)
                self._count(notifications_dropped_total=len(payloads))
                continue
            self._count(notifications_received_total=len(payloads))
            for payload in payloads:
                try:
                    self.handler(payload)
                except Exception as error:
                    message, level = "the handler of a notification from %s failed", logging.ERROR
                    self._problems.report("handler", message, sender, level=level, error=error)

    def _is_over(self, drain: Drain) -> bool:
        return time.perf_counter() >= drain.ends_at and self._polls >= drain.ends_at_poll

    def _null_block_copies(self, count: int) -> Int64s:
        return np.tile(np.array([0, 0, self._block_bytes]), (count, 1))

    def _retire(self, write: Write) -> None:
        self._writes.discard(write)
        write.connection.writes.discard(write)
        self._release(write.handle)

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            logger.debug("NIXL keeps a transfer handle for now: %s", error)
            self._unreleased.append(handle)

    def _release_left_over(self) -> None:
        handles, self._unreleased = self._unreleased, []
        for handle in handles:
            self._release(handle)

    def _count(self, **increments: float) -> None:
        values = {name: getattr(self._counters, name) + step for name, step in increments.items()}
        self._counters = replace(self._counters, **values)


def _complete(waiters: list[Future[None]]) -> None:
    for waiter in waiters:
        waiter.set_result(None)
    waiters.clear()


def _fail_all(waiters: list[Future[None]], error: TransferError) -> None:
    for waiter in waiters:
        waiter.set_exception(error)
    waiters.clear()
