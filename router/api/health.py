"""``GET /health``, ``/ping``, ``/ready``, ``/version``, ``/load`` and ``/metrics``."""

from __future__ import annotations

import importlib.metadata
from typing import Any, get_args

from cluster.members import Role
from router.services import RouterServices


def health(services: RouterServices) -> dict[str, Any]:
    """The process is alive. Says nothing about workers."""
    return {"status": "ok", "router": services.router_id}


def leadout_version() -> str:
    """The installed version."""
    return importlib.metadata.version("leadout")


def load(services: RouterServices) -> dict[str, int]:
    """Generation requests in this router now, at any stage. Load balancers know the name from vLLM."""
    return {"server_load": services.queue.num_requests}


def readiness(services: RouterServices) -> tuple[int, dict[str, Any]]:
    """200 with the models that would be served now; 503 with the reasons if there is none."""
    reasons = services.not_ready_reasons()
    if reasons:
        return 503, {"status": "not ready", "reasons": reasons}
    return 200, {"status": "ready", "models": services.ready_models()}


def metrics(services: RouterServices) -> bytes:
    """The Prometheus text format; sizes that are cheap to read are read now."""
    state, values = services.view.state, services.metrics
    values.kv_index_size.set(len(state.kv_index))
    values.kv_index_evictions.set(state.kv_index.num_evicted)
    for role in get_args(Role):
        values.connections.labels(role).set(sum(worker.record.role == role for worker in state.workers))
    return values.expose()
