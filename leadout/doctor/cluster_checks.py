"""A running cluster, as its router's ``/cluster`` shows it: workers, pairs, links, blocks that are stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.members import takes_prefills, takes_requests
from leadout.doctor.check import Finding
from leadout.errors import UserError
from leadout.status import fetch_state, unpaired

_SLOW_SHARE = 0.25  # as the workers' own warning, and docs/failures.md
_STUCK_AFTER_S = 6.0  # longer than the default lease, within which writers normally confirm
_POLL_S = 0.5

Worker = Mapping[str, Any]


def check_cluster(url: str, *, stuck_after_s: float = _STUCK_AFTER_S) -> list[Finding]:
    """Everything about the cluster behind ``url``."""
    try:
        state = fetch_state(url)
    except UserError as error:
        remedy = "give --url the address of a router, as `leadout serve` prints it"
        return [Finding("failed", str(error), remedy)]
    workers: list[Worker] = state["workers"]
    stuck = _stuck_blocks(workers, lambda: fetch_state(url)["workers"], stuck_after_s)
    return [
        judge_workers(workers),
        judge_pairs(state),
        *judge_links(workers),
        judge_quarantine(stuck, stuck_after_s),
    ]


def judge_workers(workers: Sequence[Worker]) -> Finding:
    """Whether somebody can generate, and who is not ready."""
    num_decode = sum(takes_requests(one["role"]) for one in workers)
    num_prefill = sum(takes_prefills(one["role"]) for one in workers)
    num_both = num_decode + num_prefill - len(workers)
    seen = f"{num_prefill} prefill and {num_decode} decode workers" + (
        f", {num_both} both" if num_both else ""
    )
    data = {"workers": {one["id"]: one["state"] for one in workers}}
    if not any(takes_requests(one["role"]) and one["state"] == "ready" for one in workers):
        remedy = "start a decode worker, or read the log of one that does not become ready"
        return Finding("failed", f"{seen}; no decode worker is ready", remedy, data, "workers")
    others = [f"{one['id']} ({one['role']}) is {one['state']}" for one in workers if one["state"] != "ready"]
    if others:
        remedy = (
            "one that stays in starting waits for peers or loads its model; one that is unreachable has died "
            "or its address is not reachable from the router: its log says more"
        )
        return Finding("warning", f"{seen}; {', '.join(others)}", remedy, data, "workers")
    return Finding("ok", f"{seen}, all ready", data=data, about="workers")


def judge_pairs(state: dict[str, Any]) -> Finding:
    """Workers that cannot hand over to each other."""
    data = {"incompatible": state.get("incompatible", [])}
    if not data["incompatible"]:
        return Finding("ok", "all workers can hand over to each other", data=data, about="pairs")
    reasons = "; ".join(unpaired(state))
    remedy = "start all workers of a cluster with the same version, model, model.dtype and engine.block_size"
    return Finding("warning", f"not paired: {reasons}", remedy, data, "pairs")


def judge_links(workers: Sequence[Worker]) -> list[Finding]:
    """The path from each worker into each peer that it writes to, as the worker measured it."""
    found = []
    for worker in workers:
        for link in worker["load"].get("links") or []:
            found.append(judge_link(worker["id"], link["peer"], link["probe_gbps"], link["gbps"]))
    if found:
        return found
    return [
        Finding(
            "skipped",
            "no worker reports a link: none writes to another, or they are of an older version",
            about="links",
        )
    ]


def judge_link(worker: str, peer: str, probe_gbps: float, gbps: float) -> Finding:
    """Speeds in GB/s (10^9 bytes): when connected, and the moving average since; 0 if not measured."""
    about = f"link:{worker}->{peer}"
    data = {"worker": worker, "peer": peer, "probe_gbps": probe_gbps, "gbps": gbps}
    if probe_gbps <= 0 or gbps <= 0:
        seen = "not measured yet: no large write has gone this way"
        return Finding("skipped", seen, data=data, about=about)
    seen = f"writes run at {gbps:.2f} GB/s, and the path had {probe_gbps:.2f} GB/s when they were connected"
    if gbps < _SLOW_SHARE * probe_gbps:
        remedy = (
            f"run `leadout doctor` on the machines of {worker} and {peer}, see transfer:path; else the "
            "network or the cores are busy with something else"
        )
        return Finding("warning", seen, remedy, data, about)
    return Finding("ok", seen, data=data, about=about)


def judge_quarantine(stuck: Mapping[str, int], watched_s: float) -> Finding:
    """``stuck``: per worker, how many blocks stayed in quarantine as long as it was watched."""
    data = {"stuck_blocks": dict(stuck), "watched_s": watched_s}
    if not stuck:
        return Finding("ok", "no KV blocks stay in quarantine", data=data, about="quarantine")
    shown = ", ".join(f"{worker} has {count}" for worker, count in stuck.items())
    remedy = (
        "a prefill worker that was to write them is frozen or cut off, and its log or that of its decode "
        "worker names it: let it go on, or end its process, and the blocks come back"
    )
    seen = f"KV blocks in quarantine for {watched_s:g} s and more: {shown}"
    return Finding("warning", seen, remedy, data, "quarantine")


def _stuck_blocks(
    workers: Sequence[Worker], fetch: Callable[[], Sequence[Worker]], watch_s: float
) -> dict[str, int]:
    """The least that each worker had in quarantine while watched. Ends at once where nobody has any."""
    stuck = _quarantined(workers)
    give_up_at = time.monotonic() + watch_s
    while stuck and time.monotonic() < give_up_at:
        time.sleep(min(_POLL_S, watch_s))
        now = _quarantined(fetch())
        stuck = {worker: min(count, now[worker]) for worker, count in stuck.items() if worker in now}
    return stuck


def _quarantined(workers: Sequence[Worker]) -> dict[str, int]:
    return {one["id"]: count for one in workers if (count := one["load"]["kv"]["blocks_quarantined"])}
