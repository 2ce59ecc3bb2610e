"""``/cluster``: the router's picture of the cluster, and orders to its workers, for people and tools."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from cluster.load import LoadReport
from cluster.messages import Drain
from router.api.errors import ApiError
from router.cluster_view import WorkerUnreachableError
from router.services import RouterServices
from router.worker_view import WorkerView

logger = logging.getLogger(__name__)


class DrainRequest(BaseModel):
    """The body of an order to drain. It must be JSON, which no web page can send unasked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    force: bool = Field(default=False, description="Also if it is the last worker of its role.")


def cluster_state(services: RouterServices) -> dict[str, Any]:
    """Workers with their loads, routers, and what cannot work together."""
    view = services.view
    return {
        "workers": [_worker(services, worker) for worker in view.workers],
        "routers": [msgspec.to_builtins(record) for record in view.routers],
        "incompatible": [
            {"workers": list(item.workers), "reason": item.reason} for item in view.incompatible
        ],
    }


def drain_worker(services: RouterServices, name: str, *, force: bool) -> dict[str, Any]:
    """Tell a worker to take no new work, finish what it has, and end.

    Raises ApiError: 404 if there is none, 409 if it is the last of its role and not ``force``, 503.
    """
    worker = services.view.get(name)
    if worker is None:
        known = ", ".join(one.record.id for one in services.view.workers) or "none"
        raise ApiError(
            404, f"There is no worker {name!r}. The workers are: {known}.", code="worker_not_found"
        )
    consequence = _if_drained(services, worker)
    if consequence and not force:
        raise ApiError(
            409,
            f'{consequence}. With {{"force": true}} (leadout drain --force) it is drained all the same.',
            code="last_worker",
        )
    try:
        incarnation = services.view.send(name, Drain())
    except WorkerUnreachableError as error:
        raise ApiError(503, f"{error}.", code="worker_unreachable") from error
    worker.was_told_to_drain = True
    logger.info("asked %s to drain%s", name, f" by force: {consequence}" if consequence else "")
    return {"worker": name, "incarnation": incarnation, "state": "draining"}


def _if_drained(services: RouterServices, worker: WorkerView) -> str:
    """What the cluster loses with ``worker`` if no other ready one has its role and model; "" if nothing."""
    role, model = worker.record.role, worker.record.model.name
    if worker.is_draining or any(
        other is not worker
        and other.record.role == role
        and other.record.model.name == model
        and other.is_ready
        and not other.is_draining
        for other in services.view.workers
    ):
        return ""
    lost = (
        "without it every request is refused"
        if role == "decode"
        else "without it decode workers compute all prompts themselves"
    )
    return f"{worker.record.id} is the last {role} worker for {model!r} that is not draining or down: {lost}"


def _worker(services: RouterServices, worker: WorkerView) -> dict[str, Any]:
    record = worker.record
    load = msgspec.to_builtins(worker.load or LoadReport())
    del load["steps"]["recent"]  # for the planner, not for people
    return {
        "id": record.id,
        "incarnation": record.incarnation,
        "role": record.role,
        "pid": record.pid,
        "host": record.host,
        "address": record.address,
        "metrics_address": record.metrics_address,
        "model": record.model.name,
        "dtype": record.model.dtype,
        "kernels": record.model.kernels,
        "state": worker.state,
        "load": load,
        "router": {
            "in_flight": worker.num_in_flight,
            "kv_blocks_indexed": services.view.kv_index.num_blocks(worker.slot),
        },
    }
