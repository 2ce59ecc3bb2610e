"""Orders to one worker, given through a router, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx

from leadout.errors import UserError
from leadout.status import fetch_state

_POLL_S = 0.3


def order_worker(url: str, worker: str, order: str, body: dict[str, Any]) -> int:
    """Send an order; returns the incarnation of the worker that got it.

    Raises UserError, with what the router says, if it refuses, and if there is none.
    """
    try:
        address = httpx.URL(url).copy_with(path=f"/cluster/workers/{worker}/{order}")
        response = httpx.post(address, json=body, timeout=10, trust_env=False)
        answer = response.json()
        if response.status_code != 202:
            raise UserError(str(answer["error"]["message"]))
        return int(answer["incarnation"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no Leadout router answers at {url}: {error}") from None


def follow_worker(
    url: str, worker: str, incarnation: int, *, wait_s: float
) -> Iterator[dict[str, Any] | None]:
    """What ``/cluster`` says of the worker, again and again for at most ``wait_s`` seconds.

    Ends with None once this incarnation has left. Raises UserError if there is no router.
    """
    give_up_at = time.monotonic() + wait_s
    while time.monotonic() < give_up_at:
        state = {one["id"]: one for one in fetch_state(url)["workers"]}.get(worker)
        if state is None or state["incarnation"] != incarnation:
            yield None
            return
        yield state
        time.sleep(_POLL_S)
