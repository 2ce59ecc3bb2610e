"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from router.api.errors import model_not_found
from router.services import RouterServices


def list_models(services: RouterServices) -> dict[str, Any]:
    """The models a decode worker serves now and this router can tokenize for."""
    names = [name for name in services.view.state.models(ready=True) if name in services.models]
    return {"object": "list", "data": [_model(services, name) for name in names]}


def get_model(services: RouterServices, name: str) -> dict[str, Any]:
    """One model. Raises ApiError (404)."""
    served = [other for other in services.view.state.models(ready=True) if other in services.models]
    if name not in served:
        raise model_not_found(name, served)
    return _model(services, name)


def _model(services: RouterServices, name: str) -> dict[str, Any]:
    workers = [worker.record for worker in services.view.state.decode_workers(name) if worker.is_ready]
    return {
        "id": name,
        "object": "model",
        "created": int(min((record.started_at for record in workers), default=services.started_at)),
        "owned_by": "leadout",
        "root": name,
        "parent": None,
        "max_model_len": max((record.model.max_model_len for record in workers), default=None),
    }
