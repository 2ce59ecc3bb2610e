"""The commands a person types, against a running cluster."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.integration.running_cluster import MODEL, RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def leadout(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leadout", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_status(one_prefill_one_decode: RunningCluster) -> None:
    shown = leadout("status", "--url", one_prefill_one_decode.url)
    assert shown.returncode == 0, shown.stderr
    rows = [line.split()[:3] for line in shown.stdout.splitlines()]
    assert ["worker-0", "prefill", "ready"] in rows
    assert ["worker-1", "decode", "ready"] in rows
    state = json.loads(leadout("status", "--url", one_prefill_one_decode.url, "--json").stdout)
    assert {worker["state"] for worker in state["workers"]} == {"ready"}


def test_chat_reads_lines_and_remembers(one_prefill_one_decode: RunningCluster) -> None:
    lines = "What is the capital of France?\n/reset\n/nonsense\n/exit\n"
    shown = leadout("chat", "--url", one_prefill_one_decode.url, "--max-tokens", "40", stdin=lines)
    assert shown.returncode == 0, shown.stderr
    assert "Paris" in shown.stdout
    assert "unknown command /nonsense" in shown.stdout


def test_bench(one_prefill_one_decode: RunningCluster) -> None:
    options = "--num-requests 4 --concurrency 2 --input-len 24 --output-len 5 --warmup 1 --json".split()
    run = leadout(
        "bench", "--url", one_prefill_one_decode.url, *options, "--ignore-eos", "--goodput", "ttft=60000"
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["num_requests"] == 4
    assert result["num_failed"] == 0
    assert result["ttft_ms"]["count"] == 4
    assert result["itl_ms"]["count"] >= 4 * 3
    assert result["good_requests_per_s"] == pytest.approx(result["requests_per_s"])
    assert result["server_ms"]["transfer_bytes"] > 0
    (numbers,) = result["number_formats"]
    assert f"in {numbers}" in one_prefill_one_decode.log, "the launcher says it as well"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["status", "--url", "http://127.0.0.1:9"], "no Leadout router answers"),
        (["serve", "--set", "engine.block_size=17"], "engine.block_size"),
        (["serve", "--set", "engine.blocksize=16"], "blocksize"),
        (["serve", "--set", "nonsense"], "section.field=value"),
        (["worker", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["serve", "--model", "org/unknown-model", "--port", "0"], "org/unknown-model"),
    ],
)
def test_mistakes_get_one_clear_message(arguments: list[str], named: str) -> None:
    run = leadout(*arguments)
    assert run.returncode in (1, 2)
    assert named in run.stderr + run.stdout
    assert "Traceback" not in run.stderr


def test_a_worker_whose_port_is_taken_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = leadout(
            *("worker", "--registry", "redis://127.0.0.1:1/0"),
            *("--set", f"worker.port={port}", "--set", "engine.kv_cache_memory=64MiB"),
        )
    assert run.returncode == 1
    assert f"cannot listen at tcp://127.0.0.1:{port}" in run.stderr


def test_a_worker_that_never_reached_the_registry_says_so() -> None:
    """It waits for the registry; told to end meanwhile, it says what it waited for."""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "leadout", "worker", "--registry", "redis://127.0.0.1:1/0"),
            *("--set", "engine.kv_cache_memory=64MiB"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stderr is not None
        for line in worker.stderr:
            if "waiting for the registry" in line:
                break
        assert f" worker-{socket.gethostname()}-{worker.pid}/both " in line, "the id that is made up"
        worker.terminate()
        rest = worker.stderr.read()
    assert worker.returncode == 1
    assert rest.splitlines()[-1].startswith("leadout: registry redis://127.0.0.1:1/0: Error 111 connecting")
    assert "Traceback" not in rest


def test_a_port_in_use_is_said_before_anything_starts(one_prefill_one_decode: RunningCluster) -> None:
    run = leadout("serve", "--port", one_prefill_one_decode.url.rsplit(":", 1)[1])
    assert run.returncode == 1
    assert "choose another port" in run.stderr
    assert MODEL not in run.stdout
