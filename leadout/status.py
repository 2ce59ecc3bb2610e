"""``leadout status``: the cluster as its router sees it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
from rich.live import Live
from rich.table import Table

from cluster.members import takes_requests
from leadout.console import wide_console
from leadout.errors import UserError

_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "magenta"}


def run_status(url: str, *, as_json: bool, watch_s: float | None) -> int:
    """Print the state, once or each ``watch_s`` seconds; 1 if no worker that takes requests is ready."""
    state = fetch_state(url)
    if as_json:
        print(json.dumps(state, indent=1))
    elif watch_s is None:
        console = wide_console()
        console.print(state_table(state))
        for pair in unpaired(state):
            # A reason may hold brackets, which are no markup.
            console.print(f"not paired: {pair}", style="yellow", markup=False)
    else:
        with Live(state_table(state), auto_refresh=False) as live:
            while True:
                time.sleep(watch_s)
                live.update(state_table(fetch_state(url)), refresh=True)
    is_serving = any(takes_requests(one["role"]) and one["state"] == "ready" for one in state["workers"])
    return 0 if is_serving else 1


def fetch_state(url: str) -> dict[str, Any]:
    """The router's ``/cluster``. Raises UserError if there is no router."""
    try:
        response = httpx.get(f"{url}/cluster", timeout=10, trust_env=False)
        response.raise_for_status()
        state: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(f"no Leadout router answers at {url}: {error}") from None
    if not isinstance(state, dict) or not {"workers", "routers"} <= state.keys():
        raise UserError(f"what answers at {url} is no Leadout router: its /cluster lists no workers")
    return state


def unpaired(state: dict[str, Any]) -> list[str]:
    """Which workers cannot hand over to each other, with their roles, and why."""
    shown = {worker["id"]: f"{worker['id']} ({worker['role']})" for worker in state["workers"]}
    return [
        f"{' and '.join(shown.get(name, name) for name in item['workers'])}: {item['reason']}"
        for item in state.get("incompatible", [])
    ]


def state_table(state: dict[str, Any]) -> Table:
    """Workers and routers, one per row."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("process")
    table.add_column("role")
    table.add_column("state")
    for column in ("pid", "running", "waiting", "KV free / total", "reserved", "pinned", "quarantined"):
        table.add_column(column, justify="right")
    for worker in state["workers"]:
        queue, kv = worker["load"]["queue"], worker["load"]["kv"]
        table.add_row(
            worker["id"],
            worker["role"],
            f"[{_STATE_STYLES.get(worker['state'], 'red')}]{worker['state']}[/]",
            str(worker["pid"]),
            str(queue["running"]),
            str(queue["waiting"] + queue["waiting_for_remote_kv"]),
            f"{kv['blocks_free']} / {kv['blocks_total']}",
            str(kv["blocks_reserved"]),
            str(kv["blocks_pinned"]),
            str(kv["blocks_quarantined"]),
        )
    for router in state["routers"]:
        table.add_row(router["id"], "router", "[green]ready[/]", str(router["pid"]), *[""] * 6)
    return table
