"""A worker whose engine step does not end gives itself up, and is started again."""

from __future__ import annotations

import contextlib
import threading

import httpx
import pytest

from tests.chaos.faults import RECOVERY_TIMEOUT_S
from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_step_that_takes_too_long_ends_the_worker() -> None:
    # No step ends within the shortest limit. The worker looks now and then, so it is kept busy until it has.
    cluster = RunningCluster(prefill=0, decode=1, settings={"engine.step_timeout_ms": "1"})
    (worker,) = cluster.ids_of("decode")
    first = cluster.pid(worker)
    has_ended = threading.Event()

    def keep_busy() -> None:
        while not has_ended.is_set():
            with contextlib.suppress(httpx.HTTPError):  # how it ends is not the question here
                httpx.post(
                    f"{cluster.url}/v1/completions",
                    json={"model": MODEL, "prompt": "word " * 1500, "max_tokens": 1},
                    timeout=RECOVERY_TIMEOUT_S,
                )

    client = threading.Thread(target=keep_busy)
    client.start()
    try:
        cluster.wait_until(lambda: "an engine step has run for more than 0.001 s" in cluster.log)
        has_ended.set()
        cluster.wait_until(lambda: cluster.pids().get(worker, first) != first)
    finally:
        has_ended.set()
        cluster.stop()
        client.join()
