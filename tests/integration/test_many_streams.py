"""Many streams at once, and streams that their clients leave."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.chaos.faults import frozen
from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = "river stone lamp garden seven quiet paper window copper orchard".split()


def prompt_of(index: int) -> str:
    rng = random.Random(index)
    return " ".join(rng.choices(WORDS, k=rng.choice((3, 20, 60, 150))))


def stream(cluster: RunningCluster, index: int) -> tuple[int, str]:
    """Token count from the usage chunk, and the finish reason."""
    body = {
        "model": MODEL,
        "prompt": prompt_of(index),
        "max_tokens": 4 + index % 13,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    finish, tokens, ended = "", 0, False
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line or line.startswith(":"):
                continue
            assert line.startswith("data: "), line
            if line == "data: [DONE]":
                ended = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    assert ended
    return tokens, finish


def cancelled(cluster: RunningCluster) -> float:
    """How many clients have left before the end of their answers."""
    return cluster.metric("leadout_router_requests_total", endpoint="completions", status="499")


def test_64_streams_of_mixed_length_leave_nothing_behind(one_prefill_one_decode: RunningCluster) -> None:
    cluster = one_prefill_one_decode
    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(lambda index: stream(cluster, index), range(64)))
    assert results == [(4 + index % 13, "length") for index in range(64)]
    cluster.wait_until_idle()
    metrics = httpx.get(f"{cluster.url}/metrics").text
    assert 'leadout_router_requests_total{endpoint="completions",status="200"}' in metrics
    for worker in cluster.workers():
        text = httpx.get(worker["metrics_address"]).text
        assert "leadout_worker_kv_blocks_quarantined 0.0" in text
        assert "leadout_worker_running 0.0" in text
    assert "Traceback" not in cluster.log


def test_a_client_that_leaves_frees_its_blocks_on_both_workers(
    one_prefill_one_decode: RunningCluster,
) -> None:
    cluster = one_prefill_one_decode
    cluster.wait_until_idle()
    num_cancelled = cancelled(cluster)
    body = {
        "model": MODEL,
        "prompt": prompt_of(1000) * 3,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        assert any(line.startswith("data: ") for line in response.iter_lines())
    cluster.wait_until(lambda: cancelled(cluster) == num_cancelled + 1)
    cluster.wait_until_idle()


def test_a_client_that_leaves_during_prefill_frees_its_blocks(one_prefill_one_decode: RunningCluster) -> None:
    cluster = one_prefill_one_decode
    cluster.wait_until_idle()
    num_cancelled = cancelled(cluster)
    prompt = " ".join(f"word{number}" for number in range(700))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    client = http.client.HTTPConnection(cluster.url.removeprefix("http://"))
    (prefill,), (decode,) = cluster.ids_of("prefill"), cluster.ids_of("decode")
    with frozen(cluster, prefill):  # so that the prefill takes as long as the client needs to leave
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        cluster.wait_until(lambda: "blocks_reserved" in cluster.leaked_blocks().get(decode, {}))
        client.close()
        cluster.wait_until(lambda: cancelled(cluster) == num_cancelled + 1)
    cluster.wait_until_idle()
    assert cluster.complete(prompt="Still there?", max_tokens=2)["choices"][0]["finish_reason"] == "length"
