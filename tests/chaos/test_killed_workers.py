"""Workers that die or freeze while requests run: answers stay right, and the living lose no block."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = " ".join(f"number {index}" for index in range(220))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    # A short lease, so that a dead worker is soon known to be dead.
    cluster = RunningCluster(
        prefill=1, decode=1, settings={"registry.lease_ms": "2000", "registry.heartbeat_ms": "500"}
    )
    yield cluster
    assert cluster.stop() == 0


def kill(cluster: RunningCluster, worker_id: str) -> None:
    os.kill(cluster.pid(worker_id), signal.SIGKILL)


def text_of(answer: dict[str, object]) -> str:
    return str(answer["choices"][0]["text"])  # type: ignore[index]


def in_background(
    cluster: RunningCluster, **body: object
) -> tuple[threading.Thread, list[dict[str, object]]]:
    answers: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: answers.append(cluster.complete(**body)))
    thread.start()
    return thread, answers


def test_a_prefill_worker_killed_during_prefill_costs_only_time(cluster: RunningCluster) -> None:
    expected = text_of(cluster.complete(prompt=PROMPT, cache_salt="undisturbed"))
    cluster.wait_until_idle()
    thread, answers = in_background(cluster, prompt=PROMPT, cache_salt="disturbed")
    cluster.wait_until(lambda: "prefill-0" in cluster.leaked_blocks(), 10)
    kill(cluster, "prefill-0")
    thread.join(60)
    assert [text_of(answer) for answer in answers] == [expected]
    cluster.wait_until(lambda: cluster.ready_workers() == 2, 60)  # it was started again
    cluster.wait_until_idle()

    def is_used_again() -> bool:  # once the decode worker is connected to the new life as well
        salt = f"afterwards {time.monotonic()}"
        answer = cluster.complete(prompt=PROMPT, cache_salt=salt)
        assert text_of(answer) == expected
        return str(answer["usage"]["leadout"].get("prefill_worker")) == "prefill-0"

    cluster.wait_until(is_used_again, 30)


def test_a_frozen_prefill_worker_is_fenced_before_its_blocks_are_reused(cluster: RunningCluster) -> None:
    """It may wake up and write: until it is known to have stopped, the blocks stay in quarantine."""
    cluster.wait_until(lambda: cluster.ready_workers() == 2, 60)
    cluster.wait_until_idle()
    pid = cluster.pid("prefill-0")

    def post_and_leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{cluster.url}/v1/completions",
                json={"model": MODEL, "prompt": PROMPT, "cache_salt": "frozen"},
                timeout=1.0,
            )

    client = threading.Thread(target=post_and_leave)
    client.start()
    cluster.wait_until(
        lambda: cluster.leaked_blocks().get("decode-0", {}).get("kv_blocks_reserved", 0) > 0, 5
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        client.join()
        cluster.wait_until(
            lambda: cluster.leaked_blocks().get("decode-0", {}).get("kv_blocks_quarantined", 0) > 0, 5
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.wait_until(lambda: cluster.ready_workers() == 2, 30)
    cluster.wait_until_idle(30)


def test_a_decode_worker_killed_in_mid_answer_loses_no_token(cluster: RunningCluster) -> None:
    """The router moves the stream to the next life of the worker, the only one there is."""
    cluster.wait_until(lambda: cluster.ready_workers() == 2, 60)
    cluster.wait_until_idle()
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
    expected = text_of(cluster.complete(**body))
    cluster.wait_until_idle()
    text, usage, num_chunks = "", None, 0
    streamed = {**body, "model": MODEL, "temperature": 0, "stream": True}
    streamed["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=streamed, timeout=90) as response:
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            text += "".join(choice["text"] for choice in chunk["choices"])
            num_chunks += 1
            if num_chunks == 8:
                kill(cluster, "decode-0")
    assert text == expected
    assert usage is not None
    assert usage["completion_tokens"] == 40
    cluster.wait_until(lambda: cluster.ready_workers() == 2, 60)
    cluster.wait_until_idle()


def test_the_registry_killed_and_back_loses_nothing(cluster: RunningCluster) -> None:
    cluster.wait_until(lambda: cluster.ready_workers() == 2, 60)
    cluster.wait_until_idle()
    expected = text_of(cluster.complete(prompt=PROMPT, max_tokens=30))
    thread, answers = in_background(cluster, prompt=PROMPT, max_tokens=30)
    registry = next(
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit()
        and _parent(int(entry)) == cluster.process.pid
        and b"registry.sock" in Path(f"/proc/{entry}/cmdline").read_bytes()
    )
    os.kill(registry, signal.SIGKILL)
    thread.join(60)
    assert [text_of(answer) for answer in answers] == [expected]
    for _ in range(6):  # through the time in which the new registry is empty
        assert text_of(cluster.complete(prompt=PROMPT, max_tokens=30)) == expected
        time.sleep(0.5)
    assert cluster.ready_workers() == 2
    cluster.wait_until_idle()


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1
