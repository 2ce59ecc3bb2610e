"""``leadout serve``: what a person sees while a local cluster starts, runs and stops."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.config.settings import LeadoutConfig
from leadout.console import wide_console
from leadout.local.cluster import ClusterEvents, LocalCluster

_QUIET_LEVELS = ("debug", "info")


def run_serve(config: LeadoutConfig, *, verbose: bool) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises UserError if the cluster does not start."""
    return asyncio.run(_serve(config, verbose=verbose))


async def _serve(config: LeadoutConfig, *, verbose: bool) -> int:
    console = wide_console()
    states: dict[str, str] = {}
    live: Live | None = None

    def on_state(name: str, state: str) -> None:
        states[name] = state
        if live is not None:
            live.update(_progress(states))
        elif not console.is_terminal or not state.startswith("starting"):
            console.print(f"{name}: {state}")

    def on_line(name: str, line: str) -> None:
        if verbose or not _is_quiet(line):
            console.print(Text(line), soft_wrap=True)

    cluster = LocalCluster(
        config,
        ClusterEvents(
            on_state=on_state,
            on_line=on_line,
            on_notice=lambda text: console.print(Text(text, "bold"), soft_wrap=True),
        ),
        own_registry=needs_own_registry(config),
    )
    interrupted = asyncio.Event()

    def on_signal() -> None:
        if interrupted.is_set():
            cluster.kill()
        interrupted.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(cluster.start())
    waiting = asyncio.create_task(interrupted.wait())
    giving_up = asyncio.create_task(cluster.given_up.wait())
    try:
        if console.is_terminal:
            with Live(_progress(states), console=console, transient=True, refresh_per_second=8) as live:
                await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
            live = None
        else:
            await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            _show(console, cluster, starting.result())
            await asyncio.wait([waiting, giving_up], return_when=asyncio.FIRST_COMPLETED)
        return 1 if cluster.given_up.is_set() else 0
    finally:
        starting.cancel()
        if interrupted.is_set():
            console.print("stopping (again Ctrl-C: at once)")
        await asyncio.gather(starting, return_exceptions=True)
        await cluster.stop()
        for task in (waiting, giving_up):
            task.cancel()


def needs_own_registry(config: LeadoutConfig) -> bool:
    """Whether nobody has named a registry; one named by its default URL is named."""
    return "url" not in config.registry.model_fields_set


def _is_quiet(line: str) -> bool:
    """Whether a log line is of a level that only the log files show."""
    words = line.split(" ", 2)
    return len(words) > 1 and words[1] in _QUIET_LEVELS


def _progress(states: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, state in states.items():
        table.add_row(Text("●", "green" if state.startswith("ready") else "yellow"), name, state)
    return table


def _show(console: Console, cluster: LocalCluster, state: dict[str, Any]) -> None:
    """One screen: what runs where, and how to talk to it."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("process", "role", "pid", "KV blocks", "address"):
        table.add_column(column, justify="right" if column in ("pid", "KV blocks") else "left")
    model = numbers = ""
    for worker in state["workers"]:
        model = worker["model"]
        numbers = f"{worker['dtype']}: {worker['kernels']}"
        blocks = str(worker["load"]["kv"]["blocks_total"])
        table.add_row(worker["id"], worker["role"], str(worker["pid"]), blocks, worker["address"])
    for name, pid in cluster.pids.items():
        if name in ("router-0", "registry"):
            address = cluster.url if name == "router-0" else ""
            table.add_row(name, name.removesuffix("-0"), str(pid), "", address)
    console.print(f"\n[bold]Leadout serves {model} at {cluster.url}/v1[/bold]")
    console.print(Text(f"in {numbers}\n"), soft_wrap=True)
    console.print(table)
    console.print(f"\nlogs: {cluster.log_folder}\n\nTry it:\n")
    # Printed raw and unwrapped, so that it can be copied.
    print(
        f"  curl {cluster.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{model}", "messages": [{{"role": "user", """
        """"content": "What is the capital of France?"}]}'\n""",
        flush=True,
    )
    console.print("or `leadout chat` in another terminal. Ctrl-C stops everything.\n")
