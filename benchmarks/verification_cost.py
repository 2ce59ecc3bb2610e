"""What the checksums of KV blocks cost: the same prompts with kv_transfer.verify off, sampled and all.

    python -m benchmarks.verification_cost --runs 3

One prompt at a time, so that nothing else hides or adds to the cost. Printed are medians over all requests of
the runs, the modes taking turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
from collections import defaultdict

import httpx

from benchmarks.handoff_vs_aggregated import MODEL, free_url, wait_until_ready
from leadout.bench.client import RequestRecord, Target, send
from leadout.bench.workload import WorkloadSettings, synthetic_workload

MODES = ("off", "sampled", "all")
FIGURES = ("transfer_ms", "transfer_busy_ms", "activate_ms", "transfer_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=6)
    parser.add_argument("--input-len", type=int, default=600, help="words")
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in MODES}
    for seed in range(options.runs):
        for mode in MODES:
            for name, values in run_mode(mode, seed, options).items():
                figures[mode][name] += values
    print(f"{'verify':<10}" + "".join(f"{name:>18}" for name in FIGURES))
    for mode in MODES:
        medians = [statistics.median(figures[mode][name]) for name in FIGURES]
        print(f"{mode:<10}" + "".join(f"{value:>18,.2f}" for value in medians))


def run_mode(mode: str, seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Each figure of each request."""
    url = free_url()
    command = [sys.executable, "-m", "leadout", "serve", "--port", url.rsplit(":", 1)[1]]
    server = subprocess.Popen([*command, "--set", f"kv_transfer.verify={mode}"], stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(url, 2)
        settings = WorkloadSettings(
            num_requests=options.num_requests + 1, input_len=options.input_len, output_len=2, seed=seed
        )
        _warm_up, *records = asyncio.run(one_by_one(url, settings))
    finally:
        server.terminate()
        server.wait()
    assert not any(record.error for record in records), [record.error for record in records]
    timings = [record.server_timings or {} for record in records]
    return {name: [float(one.get(name, 0.0)) for one in timings] for name in FIGURES}


async def one_by_one(url: str, settings: WorkloadSettings) -> list[RequestRecord]:
    """Send the workload's requests, each after the one before has ended."""
    target = Target(url=url, model=MODEL, ignore_eos=True)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        return [await send(client, target, request) for request in synthetic_workload(settings)]


if __name__ == "__main__":
    main()
