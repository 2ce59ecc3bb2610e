"""Workers change roles while answers are being generated: none is lost, and none is another one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import httpx
import pytest

from cluster.members import Role, takes_prefills, takes_requests
from tests.integration.running_cluster import MODEL, RunningCluster
from tests.integration.test_many_streams import prompt_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    cluster = RunningCluster(prefill=1, decode=2)
    yield cluster
    cluster.stop()


def answer(cluster: RunningCluster, index: int) -> str:
    body = {
        "model": MODEL,
        "prompt": f"{index} {prompt_of(index)}",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def flip(cluster: RunningCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leadout", "flip", *arguments, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def roles(cluster: RunningCluster) -> dict[str, str]:
    return {worker["id"]: worker["role"] for worker in cluster.workers()}


def taken(cluster: RunningCluster, worker: str) -> set[str]:
    """What new work a worker's own metrics say that it takes."""
    (address,) = [one["metrics_address"] for one in cluster.workers() if one["id"] == worker]
    lines = httpx.get(address, timeout=60).text.splitlines()
    return {
        kind for kind in ("requests", "prefills") if f'leadout_worker_role{{takes="{kind}"}} 1.0' in lines
    }


def test_flips_under_load_lose_no_answer(cluster: RunningCluster) -> None:
    wanted = [answer(cluster, index) for index in range(NUM_PROMPTS)]
    (former_prefill,), (one, other) = cluster.ids_of("prefill"), cluster.ids_of("decode")
    incarnations = {worker["id"]: worker["incarnation"] for worker in cluster.workers()}
    is_over = threading.Event()

    def keep_asking(index: int) -> int:
        num_asked = 0
        while not is_over.is_set() or not num_asked:
            assert answer(cluster, index) == wanted[index]
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        asking = [pool.submit(keep_asking, index) for index in range(NUM_PROMPTS)]
        try:
            for worker, role in (
                (other, "prefill"),
                (former_prefill, "decode"),
                (other, "both"),
                (one, "prefill"),
                (other, "decode"),
            ):
                done = flip(cluster, worker, role)
                assert (done.returncode, done.stderr) == (0, ""), done
                assert roles(cluster)[worker] == role
                assert ("prefills" in taken(cluster, worker)) == takes_prefills(role)
                assert ("requests" in taken(cluster, worker)) == takes_requests(role)
                assert f"info {worker}/{role} " in cluster.log, "its lines name the present role"
        finally:
            is_over.set()
        assert all(one.result() for one in asking)
    cluster.wait_until_idle()
    assert roles(cluster) == {former_prefill: "decode", one: "prefill", other: "decode"}
    assert [cluster.metric("leadout_router_workers", role=role) for role in get_args(Role)] == [1, 2, 0]
    assert {worker["id"]: worker["incarnation"] for worker in cluster.workers()} == incarnations
    assert "Traceback" not in cluster.log


def test_what_cannot_be_flipped_is_refused_with_the_reason(cluster: RunningCluster) -> None:
    (last,) = [worker["id"] for worker in cluster.workers() if worker["role"] == "prefill"]
    refused = flip(cluster, last, "decode")
    assert refused.returncode == 1
    assert f"{last} is the last worker that takes prefills" in refused.stderr
    assert "--force" in refused.stderr
    assert "There is no worker 'nobody'" in flip(cluster, "nobody", "both").stderr
    assert flip(cluster, last, "router").returncode == 2
