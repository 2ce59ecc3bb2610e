"""``leadout flip``: have one worker take another kind of work, without starting it anew."""

from __future__ import annotations

import time

from cluster.members import Role
from leadout.status import fetch_state
from leadout.worker_orders import order_worker

_POLL_S = 0.2


def run_flip(url: str, worker: str, role: Role, *, wait_s: float, force: bool = False) -> int:
    """Ask the router to give ``worker`` another role, then follow it for at most ``wait_s`` seconds.

    It takes the new role's work at once, and finishes what it has of the old one beside it. ``force``: also
    if nobody else takes what it gives up.

    Returns 0 once it has the role and nothing left of the old one (or at once where ``wait_s`` is 0), 1 if
    not in time or if it has left. Raises UserError if there is no such worker or no router, if it drains,
    and where nobody else takes what it gives up.
    """
    incarnation = order_worker(url, worker, "role", {"role": role, "force": force})
    if wait_s <= 0:
        print(f"{worker} becomes {role}")
        return 0
    give_up_at = time.monotonic() + wait_s
    shown = ""
    while time.monotonic() < give_up_at:
        state = {one["id"]: one for one in fetch_state(url)["workers"]}.get(worker)
        if state is None or state["incarnation"] != incarnation:
            print(f"{worker} has left")
            return 1
        num_leaving = state["load"]["num_leaving"]
        if state["role"] == role and not num_leaving:
            print(f"{worker} is {role}")
            return 0
        now = f"{worker} is {state['role']}, {num_leaving} in hand of what it takes no more"
        if now != shown:
            print(now)
            shown = now
        time.sleep(_POLL_S)
    print(f"{worker} has not finished after {wait_s:g} s; it goes on")
    return 1
