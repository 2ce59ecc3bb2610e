"""More sequences than the KV cache has blocks for: they wait, are preempted, and are answered right."""

from __future__ import annotations

import pytest

from tests.chaos.load_requests import mixed_requests
from tests.chaos.steady_load import SteadyLoad, check_answers, undisturbed_answers
from tests.integration.running_cluster import RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


def test_answers_are_right_when_the_pool_is_full() -> None:
    cluster = RunningCluster(
        prefill=1, decode=1, settings={"engine.kv_cache_memory": "20MiB", "model.dtype": "float32"}
    )
    requests = mixed_requests(6, max_prompt_tokens=130, max_answer_tokens=50)  # up to 12 of 28 blocks
    undisturbed = undisturbed_answers(cluster.url, requests)
    cluster.wait_until_idle()
    with SteadyLoad(cluster.url, requests, num_clients=8) as load:
        cluster.wait_until(
            lambda: any(one["load"]["queue"]["waiting_for_remote_kv"] for one in cluster.workers())
        )
        load.wait_for_more(12)
        answers = load.finish()
    check_answers(answers, undisturbed)
    assert sum(one["load"]["queue"]["preemptions_total"] for one in cluster.workers()) > 0
    cluster.wait_until_idle()
    assert cluster.stop() == 0
