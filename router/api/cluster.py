"""``GET /cluster``: the router's picture of the cluster, for people and tools."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.members import LoadReport
from router.services import RouterServices
from router.worker_view import WorkerView


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
        "state": load.state,
        "load": msgspec.to_builtins(load),
        "router": {
            "in_flight": worker.num_in_flight,
            "kv_blocks_indexed": services.view.kv_index.num_blocks(record.id),
        },
    }
