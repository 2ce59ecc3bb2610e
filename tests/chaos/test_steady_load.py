"""Under load each kind of process is frozen and killed: every answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from tests.chaos.faults import Freeze, Kill, inject, wait_until_busy, wait_until_whole
from tests.chaos.load_requests import chat, completion, counting_prompt, mixed_requests, stream_of
from tests.chaos.steady_load import (
    Answer,
    Outcome,
    SteadyLoad,
    ask,
    check_answers,
    new_client,
    undisturbed_answers,
)
from tests.integration.running_cluster import RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_S = 2.0
SHORT_S = 1.0
LONG_S = 3.5  # longer than the lease
NUM_CLIENTS = 4
REQUESTS = mixed_requests(6, max_prompt_tokens=400, max_answer_tokens=30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    cluster = RunningCluster(
        prefill=1,
        decode=2,
        settings={
            "registry.lease_ms": f"{LEASE_S * 1000:.0f}",
            "registry.heartbeat_ms": "500",
            "model.dtype": "float32",  # in which an answer that moves is the same bit for bit
        },
    )
    yield cluster
    assert cluster.stop() == 0


@pytest.fixture(scope="module")
def undisturbed(cluster: RunningCluster) -> Mapping[str, Answer]:
    answers = undisturbed_answers(cluster.url, REQUESTS)
    assert {answer.finish_reason for answer in answers.values()} == {"length", "stop"}
    return answers


@pytest.mark.parametrize("kind", ["prefill", "decode", "router-0", "registry"])
def test_a_process_is_frozen_and_killed(
    cluster: RunningCluster, undisturbed: Mapping[str, Answer], kind: str
) -> None:
    wait_until_whole(cluster)
    process = cluster.ids_of(kind)[0] if kind in ("prefill", "decode") else kind
    with SteadyLoad(cluster.url, REQUESTS, num_clients=NUM_CLIENTS) as load:
        for fault in (Freeze(process, SHORT_S), Freeze(process, LONG_S), Kill(process)):
            wait_until_busy(cluster, process)
            inject(cluster, fault)
            wait_until_whole(cluster)
            load.wait_for_more(2)
        answers = load.finish()
    # Who was connected to a router that died sees that at once. Nobody else notices more than time.
    check_answers(answers, undisturbed, *([Outcome.CONNECTION_ERROR] if process == "router-0" else []))
    cluster.wait_until_idle()


def test_clients_leave_at_random(cluster: RunningCluster, undisturbed: Mapping[str, Answer]) -> None:
    wait_until_whole(cluster)
    with SteadyLoad(cluster.url, REQUESTS, num_clients=8, leave_within_s=4.0) as load:
        load.wait_for_more(16)
        answers = load.finish()
    check_answers(answers, undisturbed, Outcome.LEFT)
    assert sum(answer.has_left for answer in answers) >= 4
    cluster.wait_until_idle()


async def test_streams_move_twice_with_logprobs_stop_strings_and_seeds(cluster: RunningCluster) -> None:
    wait_until_whole(cluster)
    await asyncio.to_thread(cluster.wait_until_idle)
    prompt = counting_prompt(20)
    long = {"max_tokens": 60}
    requests = [
        stream_of(completion("stop string", prompt, stop=["number 30"], **long)),  # after some 50 tokens
        stream_of(completion("logprobs", prompt, logprobs=3, **long)),
        stream_of(chat("chat, logprobs", "Count to ten.", logprobs=True, top_logprobs=3, **long)),
        stream_of(completion("sampled", prompt, temperature=0.9, seed=7, presence_penalty=0.5, **long)),
    ]
    undisturbed = await asyncio.to_thread(undisturbed_answers, cluster.url, requests)
    assert undisturbed["stop string"].finish_reason == "stop"
    moved_before = cluster.metric("leadout_router_redispatches_total", kind="migration")
    num_chunks = dict.fromkeys((request.name for request in requests), 0)
    at_last_kill = dict(num_chunks)
    to_kill = cluster.ids_of("decode")

    def on_content(name: str, num_so_far: int) -> None:
        """Kill one decode worker, and the other one once all streams run there."""
        num_chunks[name] = num_so_far
        if to_kill and all(num_chunks[one] >= at_last_kill[one] + 3 for one in num_chunks):
            at_last_kill.update(num_chunks)
            os.kill(cluster.pid(to_kill.pop(0)), signal.SIGKILL)

    async with new_client(cluster.url) as client:
        answers = await asyncio.gather(
            *(ask(client, one, on_content=partial(on_content, one.name)) for one in requests)
        )
    assert not to_kill
    check_answers(answers, undisturbed)
    moved = cluster.metric("leadout_router_redispatches_total", kind="migration") - moved_before
    assert moved >= len(requests)  # all were on the second worker when it died
    await asyncio.to_thread(wait_until_whole, cluster)
    await asyncio.to_thread(cluster.wait_until_idle)
