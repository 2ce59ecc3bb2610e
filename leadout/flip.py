"""``leadout flip``: have one worker take another kind of work, without starting it anew."""

from __future__ import annotations

from cluster.members import Role
from leadout.worker_orders import follow_worker, order_worker


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
    shown = ""
    for state in follow_worker(url, worker, incarnation, wait_s=wait_s):
        if state is None:
            print(f"{worker} has left")
            return 1
        load, num_leaving = state["load"], state["load"]["num_leaving"]
        # A report from before the flip knows of nothing that is left of the old role.
        is_current = load["role_epoch"] == state["role_epoch"]
        if state["role"] == role and is_current and not num_leaving:
            print(f"{worker} is {role}")
            return 0
        now = f"{worker} is {state['role']}, {num_leaving} in hand of what it takes no more"
        if now != shown:
            print(now)
            shown = now
    print(f"{worker} has not finished after {wait_s:g} s; it goes on")
    return 1
