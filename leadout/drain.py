"""``leadout drain``: have one worker finish what it has and end, while others take over."""

from __future__ import annotations

from leadout.worker_orders import follow_worker, order_worker


def run_drain(url: str, worker: str, *, wait_s: float, force: bool = False) -> int:
    """Ask the router to drain ``worker``, then follow it until it has left, for at most ``wait_s`` seconds.

    ``force``: also if it is the last worker of its role.

    Returns 0 once it has left (or at once where ``wait_s`` is 0), 1 if it has not in time. Raises UserError
    if there is no such worker or no router, and for the last worker of its role.
    """
    incarnation = order_worker(url, worker, "drain", {"force": force})
    if wait_s <= 0:
        print(f"{worker} drains")
        return 0
    shown = ""
    for state in follow_worker(url, worker, incarnation, wait_s=wait_s):
        if state is None:
            print(f"{worker} has left")
            return 0
        queue, num_handoffs = state["load"]["queue"], sum(state["load"]["handoffs"].values())
        now = (
            f"{worker} ({state['role']}) is {state['state']}: {queue['running']} running, "
            f"{queue['waiting'] + queue['waiting_for_remote_kv']} waiting, {num_handoffs} handoffs"
        )
        if now != shown:
            print(now)
            shown = now
    print(f"{worker} has not left after {wait_s:g} s; it goes on draining")
    return 1
