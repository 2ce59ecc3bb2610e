"""Kill and freeze each kind of process in turn under a steady load, and report what clients noticed.

    python -m benchmarks.chaos --minutes 8

Three parts, each with a check that no block is leaked at its end: faults in turn on two prefill and two
decode workers for ``--minutes``; clients that leave at random; and a cluster whose KV pool is too small for
its load. Every answer is compared with that of an undisturbed run. Printed are a table and, after it, the
same as JSON. Exit status 1 if an answer was lost or a block leaked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.faults import Fault, Freeze, Kill, inject, wait_until_busy, wait_until_whole
from tests.chaos.load_requests import mixed_requests
from tests.chaos.steady_load import Answer, Outcome, SteadyLoad, undisturbed_answers
from tests.integration.running_cluster import RunningCluster

LEASE_S = 2.0
FREEZES_S = (1.0, 4.0)  # shorter and longer than the lease
SETTINGS = {"registry.lease_ms": "2000", "registry.heartbeat_ms": "500", "model.dtype": "float32"}
SMALL_POOL = {**SETTINGS, "engine.kv_cache_memory": "64MiB"}  # 90 blocks of 16 tokens
REQUESTS = mixed_requests(24)


@dataclass(kw_only=True)
class Window:
    """The time from one fault to the next."""

    kind: str
    began_at: float  # monotonic seconds
    may_break_connections: bool = False
    notes: dict[str, float] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)  # that ended in it
    stalls_s: list[float] = field(default_factory=list)  # of streams, that ended in it
    reactions_s: list[float] = field(default_factory=list)  # from the fault to a stream's next token or error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=8.0, help="of faults in turn")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--settle-s", type=float, default=4.0, help="between recovery and the next fault")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no cluster is left behind
    windows: list[Window] = []
    leaks: dict[str, Any] = {}
    cluster = RunningCluster(prefill=2, decode=2, settings=SETTINGS)
    try:
        undisturbed = undisturbed_answers(cluster.url, REQUESTS)
        windows += faults_in_turn(cluster, options)
        leaks["faults in turn"] = leaked_blocks(cluster)
        windows += clients_leave(cluster, options)
        leaks["clients leave"] = leaked_blocks(cluster)
    finally:
        cluster.stop()
    cluster = RunningCluster(prefill=1, decode=1, settings=SMALL_POOL)
    try:
        windows += full_pool(cluster, options)
        leaks["KV pool full"] = leaked_blocks(cluster)
    finally:
        cluster.stop()
    report = {
        "load_average": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "leaked": {part: leak for part, leak in leaks.items() if leak},
        "kinds": {kind: figures(list(group), undisturbed) for kind, group in by_kind(windows).items()},
        "all faults": figures([one for one in windows if is_fault(one)], undisturbed),
    }
    print_table(report)
    print(json.dumps(report, indent=1))
    lost = [
        answer.describe(undisturbed[answer.request.name])
        for window in windows
        for answer in lost_answers(window, undisturbed)
    ]
    print("\n".join(lost))
    sys.exit(1 if lost or report["leaked"] else 0)


def faults_in_turn(cluster: RunningCluster, options: argparse.Namespace) -> list[Window]:
    """One load throughout; its first part, without a fault, is what the others compare with."""
    with SteadyLoad(cluster.url, REQUESTS, num_clients=options.clients) as load:
        load.wait_for_more(options.clients)
        windows = [Window(kind="none", began_at=time.monotonic())]
        time.sleep(30)
        give_up_at = time.monotonic() + options.minutes * 60
        for kind, fault in fault_schedule(cluster):
            if time.monotonic() > give_up_at:
                break
            wait_until_busy(cluster, fault.process)
            redispatched = cluster.metric("leadout_router_redispatches_total")
            began_at = inject(cluster, fault)
            is_router_dead = fault == Kill("router-0")
            window = Window(kind=kind, began_at=began_at, may_break_connections=is_router_dead)
            if is_router_dead:
                window.notes = time_router(cluster, began_at)
                redispatched = 0.0
            windows.append(window)
            wait_until_whole(cluster)
            window.notes["whole_after_s"] = time.monotonic() - began_at
            time.sleep(options.settle_s)
            window.notes["redispatches"] = cluster.metric("leadout_router_redispatches_total") - redispatched
            print(f"{kind}: {window.notes}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        answers = load.finish()
    assign(answers, windows)
    return windows


def fault_schedule(cluster: RunningCluster) -> Iterator[tuple[str, Fault]]:
    """For ever: each kind of process in turn, of the workers another one each time."""
    pairs = list(zip(cluster.ids_of("prefill"), cluster.ids_of("decode"), strict=True))
    for prefill, decode in itertools.cycle(pairs):
        processes = {
            "prefill worker": prefill,
            "decode worker": decode,
            "router": "router-0",
            "registry": "registry",
        }
        for name, process in processes.items():
            yield f"{name}: kill -9", Kill(process)
        for name, process in processes.items():
            for duration_s in FREEZES_S:
                yield f"{name}: frozen {duration_s:g} s", Freeze(process, duration_s)


def time_router(cluster: RunningCluster, killed_at: float) -> dict[str, float]:
    """After a kill: until the new router answers at all, and from then until it is ready for requests."""
    up_at = 0.0
    while True:
        try:
            status = httpx.get(f"{cluster.url}/ready", timeout=5, trust_env=False).status_code
        except httpx.HTTPError:
            time.sleep(0.01)
            continue
        up_at = up_at or time.monotonic()
        if status == 200:
            return {"up_after_s": up_at - killed_at, "found_workers_after_s": time.monotonic() - up_at}
        time.sleep(0.01)


def clients_leave(cluster: RunningCluster, options: argparse.Namespace) -> list[Window]:
    """Every other client leaves within four seconds of its request."""
    return plain_load(cluster, "clients leave", num_clients=2 * options.clients, leave_within_s=4.0)


def full_pool(cluster: RunningCluster, options: argparse.Namespace) -> list[Window]:
    """More sequences than there are blocks: they wait, and are preempted."""
    windows = plain_load(cluster, "KV pool full", num_clients=3 * options.clients, leave_within_s=None)
    windows[0].notes["preemptions"] = sum(
        one["load"]["queue"]["preemptions_total"] for one in cluster.workers()
    )
    return windows


def plain_load(
    cluster: RunningCluster, kind: str, *, num_clients: int, leave_within_s: float | None
) -> list[Window]:
    """A minute of load without faults of processes."""
    window = Window(kind=kind, began_at=time.monotonic())
    with SteadyLoad(cluster.url, REQUESTS, num_clients=num_clients, leave_within_s=leave_within_s) as load:
        time.sleep(60)
        assign(load.finish(), [window])
    return [window]


def leaked_blocks(cluster: RunningCluster) -> dict[str, Any]:
    """What is not free within 20 s of the end of the load, by worker."""
    give_up_at = time.monotonic() + 20
    while cluster.leaked_blocks() and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return cluster.leaked_blocks()


def assign(answers: Sequence[Answer], windows: Sequence[Window]) -> None:
    """Each answer and each stall belongs to the fault before its end."""

    def last_before(moment: float) -> Window | None:
        return next((one for one in reversed(windows) if one.began_at <= moment), None)

    for answer in answers:
        window = last_before(answer.ended_at)
        if window is not None:
            window.answers.append(answer)
        if not answer.request.is_stream:
            continue
        for begin, end in answer.gaps():
            window = last_before(end)
            if window is not None:
                window.stalls_s.append(end - begin)
        for window in windows:
            if answer.started_at < window.began_at < answer.ended_at:
                later = [moment for moment in answer.content_at if moment > window.began_at]
                window.reactions_s.append(min([*later, answer.ended_at]) - window.began_at)


def lost_answers(window: Window, undisturbed: Mapping[str, Answer]) -> list[Answer]:
    """Not the undisturbed answer, and not excused by the router's death or by the client."""
    excused = {Outcome.EQUAL, Outcome.LEFT}
    if window.may_break_connections:
        excused.add(Outcome.CONNECTION_ERROR)
    return [one for one in window.answers if one.outcome(undisturbed[one.request.name]) not in excused]


def is_fault(window: Window) -> bool:
    """Whether a process was killed or frozen at its beginning."""
    return ":" in window.kind


def by_kind(windows: Sequence[Window]) -> dict[str, list[Window]]:
    """In the order of their first appearance."""
    kinds: dict[str, list[Window]] = {}
    for window in windows:
        kinds.setdefault(window.kind, []).append(window)
    return kinds


def figures(windows: Sequence[Window], undisturbed: Mapping[str, Answer]) -> dict[str, Any]:
    """The figures of one kind of fault."""
    answers = [answer for window in windows for answer in window.answers]
    outcomes = Counter(str(answer.outcome(undisturbed[answer.request.name])) for answer in answers)
    reactions = [reaction for window in windows for reaction in window.reactions_s]
    notes: dict[str, list[float]] = {}
    for window in windows:
        for name, value in window.notes.items():
            notes.setdefault(name, []).append(round(value, 2))
    return {
        "requests": len(answers),
        "faults": sum(is_fault(window) for window in windows),
        "outcomes": dict(outcomes),
        "lost": sum(len(lost_answers(window, undisturbed)) for window in windows),
        "longest_stall_s": round(max((s for one in windows for s in one.stalls_s), default=0.0), 2),
        "streams_in_flight": len(reactions),
        "fault_to_token_or_error_p50_s": percentile(reactions, 0.5),
        "fault_to_token_or_error_p99_s": percentile(reactions, 0.99),
        **notes,
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None if there are no values."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 2)


def print_table(report: Mapping[str, Any]) -> None:
    """As Markdown."""
    print("| fault | faults | requests | lost | connection errors | longest stall, s | p50, s | p99, s |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, row in [*report["kinds"].items(), ("all faults", report["all faults"])]:
        cells = (
            kind,
            row["faults"] or "–",
            row["requests"],
            row["lost"],
            row["outcomes"].get(Outcome.CONNECTION_ERROR.value, 0),
            row["longest_stall_s"],
            row["fault_to_token_or_error_p50_s"] or "–",
            row["fault_to_token_or_error_p99_s"] or "–",
        )
        print(f"| {' | '.join(str(cell) for cell in cells)} |")


if __name__ == "__main__":
    main()
