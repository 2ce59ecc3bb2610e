"""Where a prompt is computed must not show in the answer: every topology gives the same tokens, bit for bit.

The log-probabilities are compared as well, so that a difference too small to change a token is still found.
All topologies run in the number format that ``auto`` takes, one of them in each of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.ops.number_formats import has_float16_linear, number_formats
from tests.engine.formats import FORMATS
from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM = {
    "role": "system",
    "content": "You are a careful assistant who answers in short, complete sentences and names one fact.",
}
LONG = " ".join(f"Item {number}: the lamp in room {number * 7 % 100} is on." for number in range(125))
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "H", "max_tokens": 8},
    {"prompt": [28], "max_tokens": 8},  # one token id
    {"prompt": LONG, "max_tokens": 12},  # about 2,000 tokens
    {"prompt": "The quick brown fox jumps over the lazy dog. " * 8},  # then again, fully cached
    {"prompt": "The quick brown fox jumps over the lazy dog. " * 8},
    {"messages": [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]},
    {"messages": [SYSTEM, {"role": "user", "content": "Name a river in Egypt."}]},
    {"prompt": "Grüße aus Köln, 你好, こんにちは, Здравствуйте 👋🏽 — naïve café:", "max_tokens": 20},
    {"prompt": "def fibonacci(n):\n    if n < 2:\n        return n\n", "max_tokens": 24},
    {"messages": [{"role": "user", "content": "Write one line about the sea."}], "max_tokens": 24},
]


AUTO = number_formats("auto", has_float16=has_float16_linear())[0]
OTHERS = [number_format.name for number_format in FORMATS if number_format is not AUTO]


def answer(cluster: RunningCluster, body: dict[str, Any]) -> list[tuple[str, float]]:
    """The answer's tokens with their log-probabilities."""
    is_chat = "messages" in body
    response = httpx.post(
        f"{cluster.url}/v1/chat/completions" if is_chat else f"{cluster.url}/v1/completions",
        json={"model": MODEL, "temperature": 0, "max_tokens": 16, "logprobs": True if is_chat else 1, **body},
        timeout=240,
    )
    assert response.status_code == 200, f"{response.text}\n{cluster.log[-6000:]}"
    logprobs = response.json()["choices"][0]["logprobs"]
    if is_chat:
        return [(token["token"], token["logprob"]) for token in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def prompt_tokens(cluster: RunningCluster, role: str) -> int:
    """How many the one worker of this role has computed or found in its cache."""
    (load,) = [worker["load"] for worker in cluster.workers() if worker["role"] == role]
    return int(load["steps"]["prompt_tokens_total"])


@pytest.fixture(scope="module")
def aggregated_answers() -> Iterator[list[list[tuple[str, float]]]]:
    """What one worker answers that computes prompt and answer itself."""
    cluster = RunningCluster(prefill=0, decode=1)
    answers = [answer(cluster, body) for body in PROMPTS]
    cluster.wait_until_idle()
    assert cluster.stop() == 0
    assert all(answers)
    return answers


def test_one_prefill_and_one_decode_worker(
    one_prefill_one_decode: RunningCluster, aggregated_answers: list[list[tuple[str, float]]]
) -> None:
    cluster = one_prefill_one_decode
    for body, expected in zip(PROMPTS, aggregated_answers, strict=True):
        assert answer(cluster, body) == expected, body
    cluster.wait_until_idle()
    assert prompt_tokens(cluster, "prefill") > 2000  # the long prompt was computed there


def test_two_prefill_and_two_decode_workers_all_short_prompts_at_once(
    aggregated_answers: list[list[tuple[str, float]]],
) -> None:
    cluster = RunningCluster(prefill=2, decode=2)
    indices = [index for index, body in enumerate(PROMPTS) if body.get("prompt") is not LONG]
    with ThreadPoolExecutor(len(indices)) as pool:
        answers = list(pool.map(lambda index: answer(cluster, PROMPTS[index]), indices))
    cluster.wait_until_idle()
    assert cluster.stop() == 0
    assert answers == [aggregated_answers[index] for index in indices]


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_prompt_computed_there_and_here_in_the_other_formats(dtype: str) -> None:
    cluster = RunningCluster(prefill=1, decode=1, settings={"model.dtype": dtype})
    prompts = [{**PROMPTS[index], "max_tokens": 8} for index in (1, 3, 5, 7)]
    there = [answer(cluster, body) for body in prompts]
    assert prompt_tokens(cluster, "prefill") > 100
    (prefill,) = cluster.ids_of("prefill")
    drained = httpx.post(f"{cluster.url}/cluster/workers/{prefill}/drain", json={"force": True}, timeout=60)
    assert drained.status_code == 202, drained.text
    cluster.wait_until(lambda: [worker["role"] for worker in cluster.workers()] == ["decode"], 60)
    here = [answer(cluster, {"cache_salt": "nothing is cached", **body}) for body in prompts]
    assert cluster.stop() == 0
    assert here == there
