"""The transport over NIXL: one agent, driven by one poller thread.

How UCX, NIXL's usual back end, behaves without a progress thread decides when a worker must poll:

- The first write between two agents completes only after the target has polled: they exchange addresses.
- On one host, later writes are copied by the writer's own thread (``process_vm_writev``), inside the call
  that posts them, and need nothing from the target. Notifications travel over loopback TCP.
- Over TCP the target's polling takes the bytes off its socket, so a target that sleeps stalls the write.
- A notification is seen only by polling, over every path.

Hence a target calls ``expect_traffic`` while peers may write, and an idle transport still polls ten times a
second (measured: 0.3 % of a core), so that a peer's first contact never hangs on it.

A write cannot be recalled. Closing an endpoint flushes it: over TCP, what was posted is still sent while this
side polls and the target reads (measured: 110 MB landed after a removal). Hence ``remove_peer`` lets writes
in flight end, and a write that has run out of time fails but is watched until it is over. Removing a peer
does not stop the peer from writing here, but if it has died, it makes sure that what it had sent has landed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from cluster.kv_layout import KvLayout
from cluster.load import LinkReport, TransferCounters
from cluster.members import Peer, TransportEndpoint, WorkerRecord
from kv_transfer.layout_planner import CacheShape, plan_copies
from kv_transfer.nixl.agent import AgentSettings
from kv_transfer.nixl.driver import NixlDriver
from kv_transfer.peer_table import check_peer_record
from kv_transfer.poller import Poller, polling_sleep_s
from kv_transfer.transport import (
    NotificationHandler,
    TransferError,
    TransferStats,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_LONGEST_SLEEP_BUSY_S = 0.001
_LONGEST_SLEEP_EXPECTING_S = 0.002
_LONGEST_SLEEP_IDLE_S = 0.1


class NixlTransport:
    """Writes KV blocks into peers' caches over NIXL. See ``kv_transfer.transport.Transport``.

    Registers ``num_blocks * layout.block_bytes`` bytes at ``base_address`` once; the memory must stay valid
    until ``close`` returns. Block 0 must be a null block whose content nobody relies on: warm-ups write it.

    - ``own``: this worker. Its agent's name holds the incarnation, so that a restarted worker is never taken
      for its former life.
    - ``memory``: ``"DRAM"`` or ``"VRAM"`` (of device ``device_id``).
    - ``backends``: NIXL plugins, all of which must be available.
    - ``write_timeout_s``: a write that takes longer fails with ``WriteAbandonedError``, and its peer is
      dropped. It can be added again when the write is over.

    ``add_peer`` waits 2 s for the peer's first answer and then completes anyway. The warm-up goes on in the
    background until ``write_timeout_s``.

    Raises ``TransportUnavailableError`` where NIXL cannot run.
    """

    def __init__(
        self,
        *,
        own: Peer,
        base_address: int,
        layout: KvLayout,
        num_blocks: int,
        backends: Sequence[str],
        write_timeout_s: float,
        memory: str = "DRAM",
        device_id: int = 0,
    ) -> None:
        settings = AgentSettings(
            agent_name=f"{own.worker_id}@{own.incarnation}",
            base_address=base_address,
            num_bytes=num_blocks * layout.block_bytes,
            memory=memory,
            device_id=device_id,
            backends=tuple(backends),
        )
        assert layout.tp_size == 1, "a transport serves one rank"
        self._cache = CacheShape(layout, num_blocks)
        self._own = own
        self._expected: set[str] = set()
        self._expected_lock = threading.Lock()
        self._crash_reason: str | None = None
        self._driver: NixlDriver | None = None
        self._poller = Poller(
            f"nixl-{settings.agent_name}", poll=self._poll, on_stop=self._shut_down, on_crash=self._crash
        )
        started: Future[NixlDriver] = Future()
        self._poller.start()
        self._poller.submit(
            lambda: self._start(settings, write_timeout_s, started),
        )
        try:
            driver = started.result()
        except BaseException:
            self._poller.stop()
            raise
        self._running = driver
        self._endpoint = TransportEndpoint(
            kind="nixl",
            agent_name=settings.agent_name,
            metadata=driver.metadata,
            base_address=base_address,
            num_blocks=num_blocks,
            memory=memory,
            device_id=device_id,
        )

    @property
    def endpoint(self) -> TransportEndpoint:
        """What peers need in order to write here."""
        return self._endpoint

    def on_notification(self, handler: NotificationHandler) -> None:
        """Set the handler of incoming notifications. Until then they are dropped and counted."""
        self._running.handler = handler

    def add_peer(self, record: WorkerRecord) -> Future[None]:
        """Load and warm up a peer. A peer that was dropped after an error can be added again."""
        future: Future[None] = Future()

        def connect(driver: NixlDriver) -> None:
            check_peer_record(record, kind="nixl", layout=self._cache.layout, own=self._own)
            driver.connect(record, future)

        return self._submit(future, connect)

    def remove_peer(self, peer: Peer) -> Future[None]:
        """Accept no more writes to ``peer``, let those in flight end, close its endpoint, forget its agent.

        The future completes 0.05 s later: by then the bytes that a dead peer had sent have landed too, and
        the blocks it was to fill are safe to reuse. That holds for any peer, one dropped before included.
        """
        future: Future[None] = Future()
        return self._submit(future, lambda driver: driver.remove(peer, future))

    def write_blocks(
        self, peer: Peer, local_block_ids: Sequence[int], remote_block_ids: Sequence[int]
    ) -> Future[TransferStats]:
        """Copy local blocks into the peer's, pairwise.

        Raises ``ValueError`` for unequal lengths, ids out of range, or a remote block named twice. A future
        that is cancelled before its write is posted writes nothing; afterwards it can no longer be cancelled.
        """
        if len(local_block_ids) != len(remote_block_ids):
            raise ValueError(
                f"blocks are copied pairwise, got {len(local_block_ids)} local and {len(remote_block_ids)} "
                "remote block ids"
            )
        future: Future[TransferStats] = Future()
        try:
            peer_cache = self._running.peers.require(peer).cache
        except TransferError as error:
            future.set_exception(error)
            return future
        num_tokens = len(local_block_ids) * self._cache.layout.block_size
        plan = plan_copies(
            self._cache, peer_cache, local_block_ids, remote_block_ids, first_token=0, num_tokens=num_tokens
        )
        if not plan:
            future.set_result(TransferStats(num_bytes=0, num_descriptors=0, duration_ms=0.0))
            return future
        (pair,) = plan  # equal layouts of one rank each
        return self._submit(future, lambda driver: driver.write(peer, pair.copies, future))

    def notify(self, peer: Peer, payload: bytes) -> Future[None]:
        """Send ``payload``. The future completes when the network has taken it, not when it was handled."""
        future: Future[None] = Future()

        def send(driver: NixlDriver) -> None:
            driver.notify(peer, payload)
            future.set_result(None)

        return self._submit(future, send)

    def expect_traffic(self, key: str) -> None:
        """Keep polling every 2 ms or faster until ``stop_expecting(key)``."""
        with self._expected_lock:
            self._expected.add(key)
        self._poller.submit(self._note_activity)

    def stop_expecting(self, key: str) -> None:
        """The counterpart of ``expect_traffic``. The poller goes to sleep by itself."""
        with self._expected_lock:
            self._expected.discard(key)

    def links(self) -> tuple[LinkReport, ...]:
        """The paths to the current peers, in the order they were added."""
        return tuple(connection.link for connection in self._running.peers.snapshot().values())

    def counters(self) -> TransferCounters:
        """What this transport has done so far."""
        return self._running.counters

    def close(self) -> None:
        """Fail what is outstanding, drop all peers, release the agent, end the thread. Idempotent."""
        self._poller.stop()

    def _submit(self, future: Future[_T], action: Callable[[NixlDriver], None]) -> Future[_T]:
        """Run ``action`` on the poller's thread; what it raises becomes the future's exception."""

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._driver is None:
                future.set_exception(TransferError(f"the transport has stopped: {self._crash_reason}"))
                return
            try:
                action(self._driver)
            except (TransferError, ValueError) as error:
                future.set_exception(error)
            except Exception as error:  # not ours: say so to the caller, then stop the poller
                if not future.done():
                    future.set_exception(TransferError(f"the transport has stopped: {error}"))
                raise

        if not self._poller.submit(run):
            future.set_exception(TransferError("the transport is closed"))
        return future

    def _start(
        self,
        settings: AgentSettings,
        write_timeout_s: float,
        started: Future[NixlDriver],
    ) -> None:
        try:
            self._driver = NixlDriver(
                settings,
                block_bytes=self._cache.layout.block_bytes,
                write_timeout_s=write_timeout_s,
            )
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(self._driver)

    def _note_activity(self) -> None:
        if self._driver is not None:
            self._driver.last_activity = time.perf_counter()

    def _poll(self) -> float | None:
        driver = self._driver
        if driver is None:
            return None
        driver.poll()
        if driver.is_busy:
            longest_s = _LONGEST_SLEEP_BUSY_S
        else:
            longest_s = _LONGEST_SLEEP_EXPECTING_S if self._expected else _LONGEST_SLEEP_IDLE_S
        return polling_sleep_s(time.perf_counter() - driver.last_activity, longest_s)

    def _crash(self, error: BaseException) -> None:
        self._crash_reason = f"{type(error).__name__}: {error}"
        self._shut_down()

    def _shut_down(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            try:
                driver.shut_down()
            except Exception:
                logger.exception("the NIXL agent did not shut down cleanly")
