"""Runs a workload against a server and shows the figures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leadout.bench.client import RequestRecord, Target, send
from leadout.bench.statistics import BenchResult, Distribution, Goodput, summarise
from leadout.bench.workload import BenchRequest
from leadout.errors import UserError

_NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=None)


def run_bench(
    target: Target,
    workload: Sequence[BenchRequest],
    *,
    concurrency: int | None,
    num_warmup: int,
    goodput: Goodput | None,
    as_json: bool,
    number_formats: tuple[str, ...] = (),
) -> BenchResult:
    """Send the whole workload and print the result. Raises UserError if the server does not answer."""
    if concurrency is not None and concurrency < 1:
        raise UserError(f"the concurrency is {concurrency}, must be at least 1")
    if num_warmup < 0:
        raise UserError(f"the number of warm-up requests is {num_warmup}, must be at least 0")
    console = Console(stderr=as_json)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("requests", total=len(workload))
        records, duration_s = asyncio.run(
            measure(
                target,
                workload,
                concurrency=concurrency,
                num_warmup=num_warmup,
                on_done=lambda _record: progress.advance(task),
            )
        )
    result = dataclasses.replace(summarise(records, duration_s, goodput), number_formats=number_formats)
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        show(result, console)
    return result


async def find_model(url: str) -> str:
    """The first model the server lists. Raises UserError if it does not answer."""
    try:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            response = await client.get(f"{url}/v1/models")
            response.raise_for_status()
            models = [str(model["id"]) for model in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no OpenAI-compatible server answers at {url}: {error!r}") from None
    if not models:
        raise UserError(f"the server at {url} lists no model")
    return models[0]


async def find_number_formats(target: Target) -> tuple[str, ...]:
    """What a Leadout server's workers compute in, each once; empty if it is another server."""
    try:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            response = await client.get(f"{target.url}/cluster", headers=target.headers)
            response.raise_for_status()
            workers = response.json()["workers"]
            return tuple(sorted({f"{worker['dtype']}: {worker['kernels']}" for worker in workers}))
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ()


async def measure(
    target: Target,
    workload: Sequence[BenchRequest],
    *,
    concurrency: int | None,
    num_warmup: int,
    on_done: Callable[[RequestRecord], None],
) -> tuple[list[RequestRecord], float]:
    """The records, in the workload's order, and the seconds from the first request to the last answer.

    Each request waits for its time; with ``concurrency`` at most that many are under way at once. Warm-up
    requests, copies of the first ones, run one after the other before and are not recorded.
    """
    async with httpx.AsyncClient(timeout=None, limits=_NO_LIMIT, trust_env=False) as client:
        for request in workload[:num_warmup]:
            # Another prompt of the same length, so that the measured one is not in the prefix cache.
            warmup = BenchRequest(prompt=f"warm up {request.prompt}", max_tokens=request.max_tokens)
            record = await send(client, target, warmup)
            if record.error:
                raise UserError(f"the warm-up request failed: {record.error}")
        places = asyncio.Semaphore(concurrency or len(workload))
        began = time.perf_counter()

        async def one(request: BenchRequest) -> RequestRecord:
            await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            async with places:
                record = await send(client, target, request)
            on_done(record)
            return record

        records = await asyncio.gather(*(one(request) for request in workload))
        return list(records), time.perf_counter() - began


def show(result: BenchResult, console: Console) -> None:
    """A table of the figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("ms")
    for name in ("mean", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for label, values in (
        ("TTFT", result.ttft_ms),
        ("ITL", result.itl_ms),
        ("TPOT", result.tpot_ms),
        ("E2E", result.e2e_ms),
    ):
        table.add_row(label, *_cells(values))
    console.print(table)
    console.print(
        f"\n{result.num_requests} requests, {result.num_failed} failed, in {result.duration_s:.1f} s: "
        f"{result.requests_per_s:.2f} requests/s, {result.output_tokens_per_s:.1f} output tokens/s, "
        f"{result.input_tokens_per_s:.1f} input tokens/s, {result.cached_share:.0%} of the prompts cached"
    )
    if result.good_requests_per_s is not None:
        console.print(f"goodput: {result.good_requests_per_s:.2f} requests/s within the limits")
    for numbers in result.number_formats:
        console.print(f"the server computes in {numbers}", markup=False)
    if result.server_ms:
        parts = ", ".join(f"{name} {value:.4g}" for name, value in result.server_ms.items())
        console.print(f"server's own account of the first token, medians: {parts}")
    for error, count in result.errors.items():
        console.print(f"{count} × {error}", style="red")


def _cells(values: Distribution) -> list[str]:
    return [f"{value:.1f}" for value in (values.mean, values.p50, values.p95, values.p99, values.max)]
