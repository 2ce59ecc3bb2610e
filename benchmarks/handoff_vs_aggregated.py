"""The same load on a prefill worker and a decode worker, and on one aggregated worker, one after the other.

    python benchmarks/handoff_vs_aggregated.py --runs 3

Each cluster is started anew, warmed up, and measured ``--runs`` times with other prompts; printed are medians
of the runs. The aggregated worker has the cores of both workers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx

from leadout.bench.client import Target
from leadout.bench.run import measure
from leadout.bench.statistics import BenchResult, summarise
from leadout.bench.workload import WorkloadSettings, synthetic_workload

MODEL = "smollm2-135m-instruct"
SHAPES = {"1 prefill + 1 decode": (1, 1), "1 aggregated": (0, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--request-rate", type=float, default=None)
    parser.add_argument("--input-len", type=int, default=256, help="words")
    parser.add_argument("--output-len", type=int, default=32, help="tokens")
    options = parser.parse_args()
    results = {name: run_shape(*shape, options) for name, shape in SHAPES.items()}
    print(json.dumps(results, indent=1))
    first, second = results.values()
    print("\nratio (first / second):")
    for figure, value in first.items():
        if second.get(figure):
            print(f"  {figure}: {value / second[figure]:.2f}")


def run_shape(prefill: int, decode: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the runs of one shape of cluster."""
    url = free_url()
    command = [sys.executable, "-m", "leadout", "serve", "--port", url.rsplit(":", 1)[1]]
    command += ["--prefill", str(prefill), "--decode", str(decode)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(url, prefill + decode)
        figures = [figures_of(one_run(url, seed, options)) for seed in range(1, options.runs + 1)]
    finally:
        server.terminate()
        server.wait()
    return {name: round(statistics.median(run[name] for run in figures), 2) for name in figures[0]}


def one_run(url: str, seed: int, options: argparse.Namespace) -> BenchResult:
    settings = WorkloadSettings(
        num_requests=options.num_requests,
        input_len=options.input_len,
        output_len=options.output_len,
        length_spread=0.5,
        request_rate=options.request_rate,
        seed=seed,
    )
    target = Target(url=url, model=MODEL, ignore_eos=True)
    concurrency = None if options.request_rate else options.concurrency
    records, duration_s = asyncio.run(
        measure(
            target,
            synthetic_workload(settings),
            concurrency=concurrency,
            num_warmup=2,
            on_done=lambda _record: None,
        )
    )
    return summarise(records, duration_s, None)


def figures_of(result: BenchResult) -> dict[str, float]:
    assert result.num_failed == 0, result.errors
    figures: dict[str, float] = {}
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        for part in ("p50", "p95", "p99"):
            figures[f"{name} {part}"] = getattr(getattr(result, name), part)
    figures["output tokens/s"] = result.output_tokens_per_s
    server: dict[str, Any] = result.server_ms
    for name in ("prefill_ms", "transfer_ms", "transfer_busy_ms", "activate_ms", "transfer_bytes"):
        figures[f"per request, median: {name}"] = server.get(name, 0.0)
    return figures


def free_url() -> str:
    """A local address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def wait_until_ready(url: str, num_workers: int) -> None:
    while True:
        try:
            workers = httpx.get(f"{url}/cluster", trust_env=False).json()["workers"]
            if sum(worker["state"] == "ready" for worker in workers) == num_workers:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


if __name__ == "__main__":
    main()
