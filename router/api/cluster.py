"""``/cluster``: the router's picture of the cluster, and orders to its workers, for people and tools."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cluster.members import LoadReport
from cluster.messages import Drain
from router.api.errors import ApiError
from router.cluster_view import WorkerUnreachableError
from router.services import RouterServices
from router.worker_view import WorkerView

logger = logging.getLogger(__name__)


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


def drain_worker(services: RouterServices, name: str) -> dict[str, Any]:
    """Tell a worker to take no new work, finish what it has, and end. Raises ApiError: 404, or 503."""
    worker = services.view.get(name)
    if worker is None:
        known = ", ".join(one.record.id for one in services.view.workers) or "none"
        raise ApiError(
            404, f"There is no worker {name!r}. The workers are: {known}.", code="worker_not_found"
        )
    try:
        incarnation = services.view.send(name, Drain())
    except WorkerUnreachableError as error:
        raise ApiError(503, f"{error}.", code="worker_unreachable") from error
    logger.info("asked %s to drain", name)
    return {"worker": name, "incarnation": incarnation, "state": "draining"}


def _worker(services: RouterServices, worker: WorkerView) -> dict[str, Any]:
    record = worker.record
    load = worker.load or LoadReport()
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
        "load": msgspec.to_builtins(load),
        "router": {
            "in_flight": worker.num_in_flight,
            "kv_blocks_indexed": services.view.kv_index.num_blocks(record.id),
        },
    }
