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
    # Every chunk of a long prompt takes longer than this limit.
    cluster = RunningCluster(prefill=0, decode=1, settings={"engine.step_timeout_ms": "50"})
    first = cluster.pid("decode-0")

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):  # how it ends is not the question here
            httpx.post(
                f"{cluster.url}/v1/completions",
                json={"model": MODEL, "prompt": "word " * 1500, "max_tokens": 1},
                timeout=RECOVERY_TIMEOUT_S,
            )

    client = threading.Thread(target=ask)
    client.start()
    try:
        cluster.wait_until(lambda: "an engine step has run for more than 0.05 s" in cluster.log)
        cluster.wait_until(lambda: cluster.pids().get("decode-0", first) != first)
    finally:
        cluster.stop()
        client.join()
