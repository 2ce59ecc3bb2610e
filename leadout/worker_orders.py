"""Orders to one worker, given through a router."""

from __future__ import annotations

from typing import Any

import httpx

from leadout.errors import UserError


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
