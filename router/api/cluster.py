"""``/cluster``: the router's picture of the cluster, and orders to its workers, for people and tools."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from cluster.load import LoadReport
from cluster.members import Role, takes_prefills, takes_requests
from cluster.messages import Drain, SetRole
from router.api.errors import ApiError
from router.cluster_view import WorkerUnreachableError
from router.services import RouterServices
from router.state.worker_view import WorkerView

logger = logging.getLogger(__name__)


class DrainRequest(BaseModel):
    """The body of an order to drain. It must be JSON, which no web page can send unasked."""

    model_config = ConfigDict(extra="forbid", strict=True)

    force: bool = Field(default=False, description="Also if it is the last worker of its role.")


class FlipRequest(BaseModel):
    """The body of an order to change a worker's role."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Role
    force: bool = Field(default=False, description="Also if nobody else takes what it gives up.")


def cluster_state(services: RouterServices) -> dict[str, Any]:
    """Workers with their loads, routers, and what cannot work together."""
    view = services.view
    return {
        "workers": [_worker(services, worker) for worker in view.state.workers],
        "routers": [msgspec.to_builtins(record) for record in view.routers],
        "incompatible": [
            {"workers": list(item.workers), "reason": item.reason} for item in view.incompatible
        ],
    }


def drain_worker(services: RouterServices, name: str, *, force: bool) -> dict[str, Any]:
    """Tell a worker to take no new work, finish what it has, and end.

    Raises ApiError: 404 if there is none, 409 if nobody else takes what it takes and not ``force``, 503.
    """
    worker = _find(services, name)
    consequence = _lost_without(services, worker)
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


def flip_worker(services: RouterServices, name: str, role: Role, *, force: bool) -> dict[str, Any]:
    """Tell a worker which work to take from now on; it finishes what it has. Harmless if it does so already.

    Raises ApiError: 404 if there is none, 409 if it drains, or if nobody else takes what it gives up and not
    ``force``; 503.
    """
    worker = _find(services, name)
    if worker.is_draining:
        raise ApiError(409, f"{name} drains, and will end.", code="worker_draining")
    consequence = _lost_without(services, worker, role)
    if consequence and not force:
        raise ApiError(
            409,
            f'{consequence}. With {{"force": true}} (leadout flip --force) it becomes {role} all the same.',
            code="last_worker",
        )
    try:
        incarnation = services.view.send(name, SetRole(role=role))
    except WorkerUnreachableError as error:
        raise ApiError(503, f"{error}.", code="worker_unreachable") from error
    worker.ordered_role = role
    logger.info("asked %s to become %s", name, role)
    return {"worker": name, "incarnation": incarnation, "role": role}


def _find(services: RouterServices, name: str) -> WorkerView:
    worker = services.view.state.get(name)
    if worker is None:
        known = ", ".join(one.record.id for one in services.view.state.workers) or "none"
        raise ApiError(
            404, f"There is no worker {name!r}. The workers are: {known}.", code="worker_not_found"
        )
    return worker


def _lost_without(services: RouterServices, worker: WorkerView, kept: Role | None = None) -> str:
    """What the cluster loses if ``worker`` only takes the work of ``kept``; "" if nothing.

    Another worker makes up for it if it takes the same work for the same model, is ready and does not drain.
    """
    record = worker.record
    others = [
        other
        for other in services.view.state.workers
        if other is not worker
        and other.record.model.name == record.model.name
        and other.is_ready
        and not other.is_draining
    ]
    for what, takes, consequence in (
        ("requests", takes_requests, "without it every request is refused"),
        ("prefills", takes_prefills, "without it decode workers compute all prompts themselves"),
    ):
        is_given_up = takes(record.role) and (kept is None or not takes(kept))
        if is_given_up and not worker.is_draining and not any(other.keeps(takes) for other in others):
            return (
                f"{record.id} is the last worker that takes {what} for {record.model.name!r} and is not "
                f"draining or down: {consequence}"
            )
    return ""


def _worker(services: RouterServices, worker: WorkerView) -> dict[str, Any]:
    record = worker.record
    load = msgspec.to_builtins(worker.load or LoadReport())
    del load["steps"]["recent"]  # for the planner, not for people
    return {
        "id": record.id,
        "incarnation": record.incarnation,
        "role": record.role,
        "role_epoch": record.role_epoch,
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
            "kv_blocks_indexed": services.view.state.kv_index.num_blocks(worker.slot),
        },
    }
