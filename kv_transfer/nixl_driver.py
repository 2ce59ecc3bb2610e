"""The part of the NIXL transport that owns the agent. One thread runs it: nothing here is thread-safe."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cluster.members import TransportEndpoint, WorkerRecord
from kv_transfer.descriptors import BlockCopy
from kv_transfer.nixl_agent import AgentSettings, create_agent
from kv_transfer.peer_table import PeerTable, describe
from kv_transfer.transport import (
    NotificationHandler,
    Peer,
    PeerInfo,
    TransferError,
    TransferStats,
    TransportCounters,
)

logger = logging.getLogger(__name__)

_PROBE_BYTES = 4 << 20
_PROBE_MAX_DESCRIPTORS = 256
_LINK_SAMPLE_BYTES = 1 << 20  # smaller writes say more about latency than about the link
_LINK_SAMPLE_WEIGHT = 0.2
_WAKE_UP, _PAYLOAD = b"\x00", b"\x01"


@dataclass(eq=False, slots=True)
class Connection:
    """One peer whose metadata is loaded. ``info`` is replaced, never changed: other threads read it."""

    peer: Peer
    endpoint: TransportEndpoint
    info: PeerInfo
    started_at: float
    waiters: list[Future[None]] = field(default_factory=list)  # of add_peer, until the path is warm
    writes: set[_Write] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Write:
    """One posted write."""

    purpose: Literal["blocks", "warm_up", "probe"]
    connection: Connection
    handle: Any
    num_bytes: int
    num_descriptors: int
    posted_at: float
    future: Future[TransferStats] | None  # None for warm-up and probe


class NixlDriver:
    """One NIXL agent with one registered KV cache, its peers, and the writes in flight.

    Raises ``TransportUnavailableError`` where NIXL cannot run. Methods raise ``TransferError``; an error of a
    peer's connection drops that peer. Each notification starts with one byte that tells payloads from the
    empty wake-up, which makes an idle peer poll often enough to be connected to.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        block_bytes: int,
        transfer_timeout_s: float,
        warm_up_timeout_s: float,
    ) -> None:
        self._settings = settings
        self._block_bytes = block_bytes
        self._transfer_timeout_s = transfer_timeout_s
        self._warm_up_timeout_s = warm_up_timeout_s
        self._agent, self._registration = create_agent(settings)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self.peers: PeerTable[Connection] = PeerTable()
        self.handler: NotificationHandler | None = None
        self.last_activity = time.perf_counter()
        self._counters = TransportCounters()
        self._polls = 0
        self._writes: set[_Write] = set()
        self._unreleased: list[Any] = []  # handles of writes that NIXL would not cancel yet

    @property
    def counters(self) -> TransportCounters:
        """What was done so far. Any thread may read it."""
        return replace(self._counters, polls=self._polls)

    @property
    def has_writes_in_flight(self) -> bool:
        """Whether a write, warm-ups included, is posted and not finished."""
        return bool(self._writes)

    def connect(self, record: WorkerRecord, future: Future[None]) -> None:
        """Load the peer and start to warm its path up. ``future`` completes when it is warm."""
        peer = Peer(record.id, record.incarnation)
        current = self.peers.incarnation_of(record.id)
        if current == peer:
            connection = self.peers.require(peer)
            if connection.info.warm or not connection.waiters:
                future.set_result(None)
            else:
                connection.waiters.append(future)
            return
        if current is not None:
            if current.incarnation > peer.incarnation:
                raise TransferError(
                    f"{describe(peer)} is older than {describe(current)}, which is already a peer"
                )
            self.disconnect(current, f"replaced by incarnation {peer.incarnation}")
        endpoint = record.endpoint
        if any(other.endpoint.agent_name == endpoint.agent_name for other in self.peers.snapshot().values()):
            raise TransferError(f"another peer already uses the agent name {endpoint.agent_name!r}")
        started_at = self.last_activity = time.perf_counter()
        try:
            loaded = _text(self._agent.add_remote_agent(endpoint.metadata))
            if loaded != endpoint.agent_name:
                self._forget_agent(loaded)
                raise TransferError(
                    f"the metadata of {describe(peer)} is that of agent {loaded!r}, "
                    f"its record says {endpoint.agent_name!r}"
                )
            self._agent.make_connection(loaded)
            self._agent.send_notif(loaded, _WAKE_UP)
        except TransferError:
            raise
        except Exception as error:
            self._forget_agent(endpoint.agent_name)
            raise TransferError(f"cannot connect to {describe(peer)}: {error}") from error
        info = PeerInfo(peer, endpoint.agent_name, endpoint.num_blocks, False, 0.0, 0.0, 0)
        connection = Connection(peer, endpoint, info, started_at, waiters=[future])
        self.peers.add(peer, connection)
        self._count(peers_added=1)
        self._post("warm_up", connection, self._null_block_copies(connection, 1), None)

    def disconnect(self, peer: Peer, reason: str) -> None:
        """Fail what is in flight to ``peer``, close its endpoint and forget it. Unknown peers are ignored."""
        connection = self.peers.get(peer)
        if connection is None:
            return
        self.peers.remove(peer, reason)
        error = TransferError(f"{describe(peer)}: {reason}")
        for write in list(connection.writes):
            self._retire(write)
            self._release(write.handle)
            if write.future is not None:
                self._count(writes_failed=1)
                write.future.set_exception(error)
        self._forget_agent(connection.endpoint.agent_name)
        self._release_left_over()
        for waiter in connection.waiters:
            waiter.set_exception(error)
        connection.waiters.clear()

    def write(self, peer: Peer, copies: Sequence[BlockCopy], future: Future[TransferStats]) -> None:
        """Post one write. ``copies`` have remote addresses relative to the peer's block 0."""
        connection = self.peers.require(peer)
        base, end = connection.endpoint.base_address, connection.endpoint.num_blocks * self._block_bytes
        for copy in copies:
            if copy.remote_address + copy.num_bytes > end:
                last_block = (copy.remote_address + copy.num_bytes) // self._block_bytes - 1
                raise ValueError(
                    f"remote block id {last_block} is out of range; {describe(peer)} has blocks 0 to "
                    f"{connection.endpoint.num_blocks - 1}"
                )
        self._count(writes_posted=1)
        absolute = [copy._replace(remote_address=base + copy.remote_address) for copy in copies]
        self._post("blocks", connection, absolute, future)

    def notify(self, peer: Peer, payload: bytes) -> None:
        """Hand a notification to the network. A dead peer may show only at the next call."""
        connection = self.peers.require(peer)
        self.last_activity = time.perf_counter()
        try:
            self._agent.send_notif(connection.endpoint.agent_name, _PAYLOAD + payload)
        except Exception as error:
            raise self._fail(connection, f"a notification could not be sent: {error}") from error
        self._count(notifications_sent=1)

    def poll(self) -> None:
        """Progress the network once: finish writes, enforce deadlines, hand out notifications."""
        self._polls += 1
        self._receive_notifications()
        for write in list(self._writes):
            if write in self._writes:  # the failure of another write may have taken it down
                self._check(write)
        for connection in self.peers.snapshot().values():
            if connection.waiters and time.perf_counter() - connection.started_at > self._warm_up_timeout_s:
                logger.warning(
                    "%s did not answer within %.1f s; going on without a warm path to it",
                    describe(connection.peer),
                    self._warm_up_timeout_s,
                )
                _complete(connection.waiters)

    def shut_down(self) -> None:
        """Drop all peers and release the agent."""
        for peer in list(self.peers.snapshot()):
            self.disconnect(peer, "this transport is closed")
        self._release_left_over()
        try:
            self._agent.deregister_memory(self._registration)
        except Exception:
            logger.warning("NIXL could not deregister the KV cache", exc_info=True)
        self._agent = self._registration = None

    def _post(
        self,
        purpose: Literal["blocks", "warm_up", "probe"],
        connection: Connection,
        copies: Sequence[BlockCopy],
        future: Future[TransferStats] | None,
    ) -> None:
        endpoint, settings, agent = connection.endpoint, self._settings, self._agent
        local = [(copy.local_address, copy.num_bytes, settings.device_id) for copy in copies]
        remote = [(copy.remote_address, copy.num_bytes, endpoint.device_id) for copy in copies]
        posted_at = self.last_activity = time.perf_counter()
        handle = None
        try:
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(local, settings.memory),
                agent.get_xfer_descs(remote, endpoint.memory),
                endpoint.agent_name,
            )
            state = agent.transfer(handle)
        except Exception as error:
            if handle is not None:
                self._release(handle)
            self._fail(connection, f"a write could not be posted: {error}", future)
            return
        num_bytes = sum(copy.num_bytes for copy in copies)
        write = _Write(purpose, connection, handle, num_bytes, len(copies), posted_at, future)
        self._writes.add(write)
        connection.writes.add(write)
        self._settle(write, state)

    def _check(self, write: _Write) -> None:
        try:
            state = self._agent.check_xfer_state(write.handle)
        except Exception as error:
            self._fail(write.connection, f"a write failed: {error}")
            return
        self._settle(write, state)

    def _settle(self, write: _Write, state: str) -> None:
        """Act on the state NIXL gave for ``write``: "DONE", "PROC" or "ERR"."""
        now = time.perf_counter()
        waited_s = now - write.posted_at
        if state == "DONE":
            self.last_activity = now
            self._retire(write)
            self._release(write.handle)
            self._finish(write, waited_s)
        elif state != "PROC":
            self._fail(write.connection, f"a write failed in state {state}")
        elif waited_s > self._transfer_timeout_s:
            self._fail(
                write.connection,
                f"a write of {write.num_bytes} bytes was not done after {self._transfer_timeout_s} s",
            )

    def _finish(self, write: _Write, duration_s: float) -> None:
        connection = write.connection
        if write.purpose == "warm_up":
            connect_ms = (time.perf_counter() - connection.started_at) * 1000
            connection.info = replace(connection.info, warm=True, connect_ms=connect_ms)
            num_copies = min(max(_PROBE_BYTES // self._block_bytes, 1), _PROBE_MAX_DESCRIPTORS)
            self._post("probe", connection, self._null_block_copies(connection, num_copies), None)
            return
        if not connection.info.warm:  # the peer answered a block write before it answered the warm-up
            connection.info = replace(connection.info, warm=True)
        gbps = write.num_bytes / max(duration_s, 1e-9) / 1e9
        if write.purpose == "probe":
            connection.info = replace(connection.info, link_gbps=gbps)
            logger.info(
                "connected to %s in %.1f ms, %.2f GB/s",
                describe(connection.peer),
                connection.info.connect_ms,
                gbps,
            )
            _complete(connection.waiters)
            return
        if write.num_bytes >= _LINK_SAMPLE_BYTES:
            known = connection.info.link_gbps or gbps
            connection.info = replace(connection.info, link_gbps=known + _LINK_SAMPLE_WEIGHT * (gbps - known))
        self._count(
            writes_completed=1,
            bytes_written=write.num_bytes,
            descriptors_written=write.num_descriptors,
            write_seconds=duration_s,
        )
        assert write.future is not None
        write.future.set_result(TransferStats(write.num_bytes, write.num_descriptors, duration_s * 1000))

    def _fail(
        self, connection: Connection, reason: str, future: Future[TransferStats] | None = None
    ) -> TransferError:
        """Drop a peer whose connection does not work. ``future`` belongs to a write that was never posted."""
        peer = connection.peer
        if future is not None:
            self._count(writes_failed=1)
            future.set_exception(TransferError(f"{describe(peer)}: {reason}"))
        if self.peers.get(peer) is connection:
            logger.warning("dropping peer %s: %s", describe(peer), reason)
            self._count(peers_failed=1)
            self.disconnect(peer, reason)
        return TransferError(f"{describe(peer)}: {reason}")

    def _receive_notifications(self) -> None:
        arrived: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        if not arrived:
            return
        self.last_activity = time.perf_counter()
        names = {connection.endpoint.agent_name for connection in self.peers.snapshot().values()}
        for sender, messages in arrived.items():
            payloads = [message[1:] for message in messages if message[:1] == _PAYLOAD]
            if not payloads:
                continue
            if _text(sender) not in names or self.handler is None:
                logger.warning("dropped %d notifications from agent %s", len(payloads), _text(sender))
                self._count(notifications_dropped=len(payloads))
                continue
            self._count(notifications_received=len(payloads))
            for payload in payloads:
                try:
                    self.handler(payload)
                except Exception:
                    logger.exception("the handler of a notification from %s failed", _text(sender))

    def _null_block_copies(self, connection: Connection, count: int) -> list[BlockCopy]:
        copy = BlockCopy(self._settings.base_address, connection.endpoint.base_address, self._block_bytes)
        return [copy] * count

    def _retire(self, write: _Write) -> None:
        self._writes.discard(write)
        write.connection.writes.discard(write)

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

    def _forget_agent(self, agent_name: str) -> None:
        with contextlib.suppress(Exception):  # it is gone either way, and NIXL reports unknown agents so
            self._agent.remove_remote_agent(agent_name)

    def _count(self, **increments: float) -> None:
        values = {name: getattr(self._counters, name) + step for name, step in increments.items()}
        self._counters = replace(self._counters, **values)


def _complete(waiters: list[Future[None]]) -> None:
    for waiter in waiters:
        waiter.set_result(None)
    waiters.clear()


def _text(agent_name: str | bytes) -> str:
    return agent_name.decode() if isinstance(agent_name, bytes) else agent_name
