"""Real NIXL between real processes: bytes arrive, notifications follow, and dead peers hang nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class PeerProcess:
    def __init__(self, worker_id: str, role: str, incarnation: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.nixl_peer", worker_id, role, str(incarnation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.peer = [worker_id, incarnation]
        self.record: str = self._read()["record"]

    def __call__(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def ok(self, do: str, **fields: Any) -> dict[str, Any]:
        answer = self(do, **fields)
        assert "error" not in answer, answer
        return answer

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, "the process has ended"
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pair() -> Iterator[tuple[PeerProcess, PeerProcess]]:
    prefill, decode = PeerProcess("prefill-0", "prefill"), PeerProcess("decode-0", "decode")
    prefill.ok("add", record=decode.record)
    decode.ok("add", record=prefill.record)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def test_blocks_arrive_where_they_belong_and_nowhere_else(pair: tuple[PeerProcess, PeerProcess]) -> None:
    prefill, decode = pair
    prefill.ok("fill", seed=100)
    stats = prefill.ok("write", peer=decode.peer, local=[5, 6, 7, 20], remote=[11, 12, 13, 40])
    assert stats["num_descriptors"] == 2
    assert stats["num_bytes"] == 4 * 4 * 2 * 2 * 16 * 16 * 4
    blocks = decode.ok("read", blocks=[10, 11, 12, 13, 14, 40])["blocks"]
    assert blocks == [[0], [105], [106], [107], [0], [120]]


def test_a_notification_follows_the_data(pair: tuple[PeerProcess, PeerProcess]) -> None:
    prefill, decode = pair
    decode.ok("expect")
    prefill.ok("fill", seed=0)
    prefill.ok("write", peer=decode.peer, local=list(range(1, 60)), remote=list(range(1, 60)))
    prefill.ok("notify", peer=decode.peer, payload="sealed r1")
    assert decode.ok("notifications", count=1)["notifications"] == ["sealed r1"]
    assert decode.ok("read", blocks=[1, 59])["blocks"] == [[1], [59]]


def test_a_killed_peer_fails_writes_and_hangs_nothing(pair: tuple[PeerProcess, PeerProcess]) -> None:
    prefill, decode = pair
    decode.stop()
    for _ in range(3):
        answer = prefill("write", peer=decode.peer, local=[1], remote=[1])
        if "error" in answer:
            break
    prefill.ok("remove", peer=decode.peer)
    answer = prefill("write", peer=decode.peer, local=[1], remote=[1])
    assert answer["error"].startswith("TransferError")


def test_a_restarted_peer_is_another_peer(pair: tuple[PeerProcess, PeerProcess]) -> None:
    prefill, decode = pair
    decode.stop()
    again = PeerProcess("decode-0", "decode", incarnation=2)
    try:
        prefill.ok("add", record=again.record)  # the old agent is removed first
        again.ok("add", record=prefill.record)
        prefill.ok("fill", seed=7)
        prefill.ok("write", peer=again.peer, local=[3], remote=[4])
        assert again.ok("read", blocks=[4])["blocks"] == [[10]]
        old = prefill("write", peer=decode.peer, local=[3], remote=[4])
        assert old["error"].startswith("TransferError")
    finally:
        again.stop()


def test_wrong_blocks_are_refused_before_anything_is_written(pair: tuple[PeerProcess, PeerProcess]) -> None:
    prefill, decode = pair
    answer = prefill("write", peer=decode.peer, local=[1], remote=[64])
    assert answer["error"].startswith("ValueError")
    assert "64" in answer["error"]


def test_an_idle_pair_sleeps(pair: tuple[PeerProcess, PeerProcess]) -> None:
    """Loosely: a poller that spins would show as a whole core."""
    prefill, decode = pair
    prefill.ok("write", peer=decode.peer, local=[1], remote=[1])
    prefill.ok("idle", seconds=0.5)
    assert prefill.ok("idle", seconds=1.5)["cpu_share"] < 0.2
    assert decode.ok("idle", seconds=1.5)["cpu_share"] < 0.2


def test_closing_ends_the_process_cleanly(pair: tuple[PeerProcess, PeerProcess]) -> None:
    prefill, _ = pair
    prefill.ok("close")
    assert prefill.process.wait(20) == 0
