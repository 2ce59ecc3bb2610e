"""A worker's transport in a process of its own: reads commands as JSON lines, answers with JSON lines.

``python -m tests.kv_transfer.nixl.nixl_peer ID ROLE INCARNATION WRITE_TIMEOUT_MS``. What a block holds is a
function of its id and the seed that ``fill`` gives, see ``content``.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from cluster.kv_layout import KvLayout
from cluster.members import Peer, WorkerRecord
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import TransferError, WriteAbandonedError
from tests.kv_transfer.peers import record

LAYOUT = KvLayout(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 256  # of 256 KiB
WAIT_S = 30.0


def content(block_id: int, seed: int) -> bytes:
    """What ``fill`` puts into a block."""
    return random.Random(f"{block_id} {seed}").randbytes(1024) * (LAYOUT.block_bytes // 1024)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class PeerServer:
    """The transport, its cache, and one method per command."""

    def __init__(self, worker_id: str, role: str, incarnation: int, write_timeout_ms: int) -> None:
        self.cache = ctypes.create_string_buffer(NUM_BLOCKS * LAYOUT.block_bytes)
        self.transport = NixlTransport(
            backends=["UCX"],
            write_timeout_s=write_timeout_ms / 1000,
            own=Peer(worker_id, incarnation),
            base_address=ctypes.addressof(self.cache),
            num_blocks=NUM_BLOCKS,
            layout=LAYOUT,
        )
        self.notifications: list[list[str]] = []
        self.started: list[Future[Any]] = []
        self.at_removal = b""
        self.transport.on_notification(self._notified)
        own = record(worker_id, role, incarnation, endpoint=self.transport.endpoint)  # type: ignore[arg-type]
        own = msgspec.structs.replace(own, kv_layout=LAYOUT)
        self.record = base64.b64encode(msgspec.msgpack.encode(own)).decode()

    def _notified(self, payload: bytes) -> None:
        self.notifications.append([payload.decode(), self._digest(1)])
        if payload == b"raise":
            raise RuntimeError("a bug in the handler")

    def _digest(self, block_id: int) -> str:
        address = ctypes.addressof(self.cache) + block_id * LAYOUT.block_bytes
        return digest(ctypes.string_at(address, LAYOUT.block_bytes))

    def add(self, record: str) -> None:
        data = base64.b64decode(record)
        self.transport.add_peer(msgspec.msgpack.decode(data, type=WorkerRecord)).result(WAIT_S)

    def remove(self, peer: tuple[str, int]) -> int:
        """How often the transport polled before it said that the peer is gone."""
        before = self.transport.counters().polls_total
        self.transport.remove_peer(Peer(*peer)).result(WAIT_S)
        self.at_removal = self.cache.raw
        return self.transport.counters().polls_total - before

    def has_changed_since_removal(self) -> bool:
        return self.cache.raw != self.at_removal

    def start_remove(self, peer: tuple[str, int]) -> None:
        self.started.append(self.transport.remove_peer(Peer(*peer)))

    def peers(self) -> list[list[Any]]:
        """Per peer its id, and whether its path is warm: a warm one has been measured."""
        return [[link.peer, link.probe_gbps > 0] for link in self.transport.links()]

    def links(self) -> list[list[float]]:
        """Per peer the GB/s of the probe and of the writes since."""
        return [[link.probe_gbps, link.gbps] for link in self.transport.links()]

    def fill(self, seed: int) -> None:
        for block_id in range(1, NUM_BLOCKS):
            address = ctypes.addressof(self.cache) + block_id * LAYOUT.block_bytes
            ctypes.memmove(address, content(block_id, seed), LAYOUT.block_bytes)

    def write(self, peer: tuple[str, int], local: list[int], remote: list[int]) -> list[int]:
        """The bytes and descriptors that it took."""
        stats = self.transport.write_blocks(Peer(*peer), local, remote).result(WAIT_S)
        return [stats.num_bytes, stats.num_descriptors]

    def start_writes(self, peer: tuple[str, int], count: int) -> None:
        """Each of them writes the whole cache, 64 MB."""
        blocks = range(1, NUM_BLOCKS)
        for _ in range(count):
            self.started.append(self.transport.write_blocks(Peer(*peer), blocks, blocks))

    def outcomes(self, timeout_s: float = WAIT_S) -> list[str]:
        """How what was started ended: "done", "pending" after ``timeout_s``, or the error."""
        give_up_at = time.monotonic() + timeout_s
        return [_outcome(future, give_up_at) for future in self.started]

    def wait_until_over(self) -> int:
        """Wait until the abandoned ones of what was started cannot land any more. How many there were."""
        errors = [future.exception(WAIT_S) for future in self.started]
        abandoned = [error for error in errors if isinstance(error, WriteAbandonedError)]
        for error in abandoned:
            error.over.result(WAIT_S)
        return len(abandoned)

    def notify(self, peer: tuple[str, int], payload: str) -> None:
        self.transport.notify(Peer(*peer), payload.encode()).result(WAIT_S)

    def received(self, count: int) -> list[list[str]]:
        """The notifications, each with the digest that block 1 had when it came."""
        give_up_at = time.monotonic() + WAIT_S
        while len(self.notifications) < count and time.monotonic() < give_up_at:
            time.sleep(0.005)
        return self.notifications

    def digests(self, blocks: list[int] | None = None) -> list[str]:
        """Of the given blocks, or of all."""
        return [self._digest(block_id) for block_id in (range(NUM_BLOCKS) if blocks is None else blocks)]

    def expect(self, key: str) -> None:
        self.transport.expect_traffic(key)

    def stop_expecting(self, key: str) -> None:
        self.transport.stop_expecting(key)

    def idle(self, seconds: float) -> list[float]:
        """How often the transport polled while nothing was done, and the seconds that this took."""
        began_at, before = time.perf_counter(), self.transport.counters().polls_total
        time.sleep(seconds)
        return [self.transport.counters().polls_total - before, time.perf_counter() - began_at]

    def counters(self) -> dict[str, float]:
        return msgspec.structs.asdict(self.transport.counters())

    def wait_for_counter(self, name: str, value: float) -> None:
        give_up_at = time.monotonic() + WAIT_S
        while self.counters()[name] < value:
            assert time.monotonic() < give_up_at, f"{name} is {self.counters()[name]}"
            time.sleep(0.005)

    def close(self) -> None:
        self.transport.close()


def _outcome(future: Future[Any], give_up_at: float) -> str:
    try:
        future.result(max(give_up_at - time.monotonic(), 0.0))
    except TransferError as error:
        return f"{type(error).__name__}: {error}"
    except TimeoutError:
        return "pending"
    return "done"


def main() -> None:
    worker_id, role, incarnation, write_timeout_ms = sys.argv[1:]
    server = PeerServer(worker_id, role, int(incarnation), int(write_timeout_ms))
    _answer(result=server.record)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        command: Callable[..., Any] = getattr(server, name)
        try:
            _answer(result=command(**arguments))
        except (TransferError, ValueError) as error:
            _answer(error=f"{type(error).__name__}: {error}")


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
