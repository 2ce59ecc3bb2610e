"""One fault at a chosen moment of one request, on one prefill and one decode worker."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.faults import frozen, wait_until_whole
from tests.chaos.load_requests import completion, counting_prompt, stream_of
from tests.chaos.steady_load import Answer, LoadRequest, Outcome, ask, new_client, undisturbed_answers
from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_S = 2.0
PROMPT = counting_prompt(220)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningCluster]:
    cluster = RunningCluster(
        prefill=1,
        decode=1,
        settings={
            "registry.lease_ms": f"{LEASE_S * 1000:.0f}",  # so that a dead worker is soon known to be dead
            "registry.heartbeat_ms": "500",
            "model.dtype": "float32",  # in which an answer that moves is the same bit for bit
        },
    )
    yield cluster
    assert cluster.stop() == 0


@pytest.fixture
def cluster(running: RunningCluster) -> Iterator[RunningCluster]:
    """As each test finds it and must leave it: every process ready, and no block in use."""
    wait_until_whole(running)
    running.wait_until_idle()
    yield running
    wait_until_whole(running)
    running.wait_until_idle()


def kill(cluster: RunningCluster, process: str) -> None:
    os.kill(cluster.pid(process), signal.SIGKILL)


def text_of(answer: dict[str, object]) -> str:
    return str(answer["choices"][0]["text"])  # type: ignore[index]


def in_background(
    cluster: RunningCluster, **body: object
) -> tuple[threading.Thread, list[dict[str, object]]]:
    answers: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: answers.append(cluster.complete(**body)))
    thread.start()
    return thread, answers


def blocks(cluster: RunningCluster, worker: str, kind: str) -> int:
    """Blocks of a worker that are in use in this way."""
    return cluster.leaked_blocks().get(worker, {}).get(kind, 0)


def test_a_prefill_worker_killed_during_prefill_costs_only_time(cluster: RunningCluster) -> None:
    (prefill,) = cluster.ids_of("prefill")
    expected = text_of(cluster.complete(prompt=PROMPT, cache_salt="undisturbed"))
    cluster.wait_until_idle()
    thread, answers = in_background(cluster, prompt=PROMPT, cache_salt="disturbed")
    cluster.wait_until(lambda: prefill in cluster.leaked_blocks())
    kill(cluster, prefill)
    thread.join()
    assert [text_of(answer) for answer in answers] == [expected]
    assert cluster.metric("leadout_router_redispatches_total", kind="retry") >= 1
    wait_until_whole(cluster)  # it was started again

    def is_used_again() -> bool:  # once the decode worker is connected to the new life as well
        salt = f"afterwards {time.monotonic()}"
        answer = cluster.complete(prompt=PROMPT, cache_salt=salt)
        assert text_of(answer) == expected
        return bool(answer["leadout"]["timings"]["prefill_worker"] == prefill)

    cluster.wait_until(is_used_again)


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_a_frozen_prefill_workers_targets_stay_in_quarantine(cluster: RunningCluster, end: str) -> None:
    """It may wake up and write: no lease that ends frees a block until it has stopped or is dead."""
    (prefill,), (decode,) = cluster.ids_of("prefill"), cluster.ids_of("decode")
    client = http.client.HTTPConnection(cluster.url.removeprefix("http://"))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "cache_salt": f"frozen, then {end}"}
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    cluster.wait_until(lambda: blocks(cluster, decode, "blocks_reserved") > 0)
    with frozen(cluster, prefill) as pid:
        client.close()  # it leaves
        cluster.wait_until(lambda: blocks(cluster, decode, "blocks_quarantined") > 0)
        quarantined = blocks(cluster, decode, "blocks_quarantined")
        cluster.wait_until(lambda: len(cluster.workers()) == 1)  # its lease has ended
        time.sleep(LEASE_S)  # whatever the decode worker's timers would do by now
        assert blocks(cluster, decode, "blocks_quarantined") == quarantined
        if end == "is killed":
            os.kill(pid, signal.SIGKILL)
            cluster.wait_until(lambda: cluster.pids().get(prefill) != pid)


def test_a_decode_worker_killed_in_mid_answer_loses_no_token(cluster: RunningCluster) -> None:
    """The router moves the stream to the next life of the worker, the only one there is."""
    (decode,) = cluster.ids_of("decode")
    request = stream_of(completion("counting", PROMPT, max_tokens=40))
    expected = undisturbed_answers(cluster.url, [request])["counting"]

    def on_content(num_chunks: int) -> None:
        if num_chunks == 8:
            kill(cluster, decode)

    answer = asyncio.run(_ask(cluster, request, on_content))
    assert answer.outcome(expected) is Outcome.EQUAL, answer.describe(expected)
    assert cluster.metric("leadout_router_redispatches_total", kind="migration") == 1


async def _ask(cluster: RunningCluster, request: LoadRequest, on_content: Callable[[int], None]) -> Answer:
    async with new_client(cluster.url) as client:
        return await ask(client, request, on_content=on_content)
