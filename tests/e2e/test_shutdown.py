"""A cluster that is told to stop finishes the answers under way, and leaves no process behind."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_sigterm_lets_a_stream_finish_and_ends_every_process() -> None:
    cluster = RunningCluster(prefill=1, decode=1)
    pids = _descendants(cluster)
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
    }
    chunks: list[dict[str, object]] = []
    has_begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    has_begun.set()

    client = threading.Thread(target=read)
    client.start()
    assert has_begun.wait(20)
    cluster.process.send_signal(signal.SIGTERM)
    client.join(60)
    assert cluster.stop() == 0
    assert not [chunk for chunk in chunks if "error" in chunk]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    _wait_until_gone(pids)


def test_killing_the_launcher_kills_its_processes() -> None:
    cluster = RunningCluster(prefill=0, decode=1)
    pids = _descendants(cluster)
    cluster.process.kill()
    cluster.process.wait()
    _wait_until_gone(pids)


def _descendants(cluster: RunningCluster) -> list[int]:
    """All processes of the cluster but the launcher, the one that works on large bodies among them."""
    cluster.complete(prompt="Hi", max_tokens=1, metadata={"size": "x" * 10_000})
    processes = psutil.Process(cluster.process.pid).children(recursive=True)
    assert any("router.body_process" in process.cmdline() for process in processes)
    return [process.pid for process in processes]


def _wait_until_gone(pids: list[int]) -> None:
    """The kernel ends those whose parent was killed, a moment later."""
    give_up_at = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
