"""Workers that are told to end while they are busy: nobody loses an answer, and they end with status 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.chaos.faults import RECOVERY_TIMEOUT_S, wait_until_busy, wait_until_whole
from tests.chaos.load_requests import mixed_requests
from tests.chaos.steady_load import SteadyLoad, check_answers, undisturbed_answers
from tests.integration.running_cluster import RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


def test_workers_drain_under_load() -> None:
    cluster = RunningCluster(
        prefill=1,
        decode=2,
        settings={
            "worker.drain_grace_ms": "1",  # too short for anything: what a busy worker has must move
            "model.dtype": "float32",
        },
    )
    (prefill,), (_, decode) = cluster.ids_of("prefill"), cluster.ids_of("decode")
    requests = mixed_requests(6, max_prompt_tokens=200, max_answer_tokens=40)
    undisturbed = undisturbed_answers(cluster.url, requests)
    with SteadyLoad(cluster.url, requests, num_clients=4) as load:
        load.wait_for_more(2)
        wait_until_busy(cluster, decode, num_requests=2)  # one may be over when the signal comes
        os.kill(cluster.pid(decode), signal.SIGTERM)
        # Said of processes that end with status 0 only.
        cluster.wait_until(lambda: f"{decode} has drained and is not started again" in cluster.log)
        cluster.num_workers -= 1
        wait_until_whole(cluster)
        load.wait_for_more(2)
        wait_until_busy(cluster, prefill)
        drained = subprocess.run(
            [sys.executable, "-m", "leadout", "drain", prefill, "--force", "--url", cluster.url],
            capture_output=True,
            text=True,
            timeout=RECOVERY_TIMEOUT_S,
        )
        assert drained.returncode == 0, drained
        cluster.wait_until(lambda: f"{prefill} has drained and is not started again" in cluster.log)
        cluster.num_workers -= 1
        wait_until_whole(cluster)
        load.wait_for_more(2)  # with nobody left to prefill for the decode worker
        answers = load.finish()
    check_answers(answers, undisturbed)
    assert cluster.metric("leadout_router_redispatches_total", reason="draining") > 0
    cluster.wait_until_idle()
    assert cluster.stop() == 0
