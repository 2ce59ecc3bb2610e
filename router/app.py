"""The HTTP application: routes, request ids, and errors in one shape."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api import health
from router.api.chat import chat_completions
from router.api.cluster import cluster_state, drain_worker
from router.api.completions import completions
from router.api.errors import ApiError, ClientDisconnectedError, internal_error, overloaded
from router.api.models import get_model, list_models
from router.api.schemas import ChatCompletionRequest, CompletionRequest
from router.api.streaming import CLIENT_CLOSED_REQUEST
from router.metrics import RouterMetrics
from router.services import RouterServices

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


def create_app(services: RouterServices) -> FastAPI:
    """The ASGI application over ``services``."""
    app = FastAPI(title="Leadout", docs_url="/docs", redoc_url=None)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatCompletionRequest))
    async def post_chat_completions(request: Request) -> Response:
        return await chat_completions(services, request)

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def post_completions(request: Request) -> Response:
        return await completions(services, request)

    @app.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return list_models(services)

    @app.get("/v1/models/{name:path}")
    async def get_one_model(name: str) -> dict[str, Any]:
        return get_model(services, name)

    @app.get("/cluster")
    async def get_cluster() -> dict[str, Any]:
        return cluster_state(services)

    @app.post("/cluster/workers/{worker}/drain", status_code=202)
    async def post_drain(worker: str) -> dict[str, Any]:
        return drain_worker(services, worker)

    @app.get("/health")
    async def get_health() -> dict[str, Any]:
        return health.health(services)

    @app.get("/ready")
    async def get_ready() -> JSONResponse:
        status, body = health.readiness(services)
        return JSONResponse(body, status_code=status)

    @app.get("/metrics", response_class=Response)
    async def get_metrics() -> Response:
        return Response(health.metrics(services), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return _final(error)

    @app.exception_handler(ClientDisconnectedError)
    async def on_disconnect(request: Request, error: ClientDisconnectedError) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        response = _routing_error(request, error).response()
        response.headers.update(error.headers or {})
        return response

    app.add_middleware(
        RequestMiddleware,
        metrics=services.metrics,
        max_requests=services.limits.max_concurrent_requests,
    )
    return app


class RequestMiddleware:
    """Gives each request its id, bounds and counts them, and turns unexpected exceptions into a 500.

    Plain ASGI, because a middleware that wraps ``receive`` would hide disconnects from the handlers.
    """

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, max_requests: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_requests = max_requests
        self._num_requests = 0  # generation requests at any stage, those whose body is still read included

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        endpoint = _ENDPOINTS.get(scope["path"])
        if endpoint is None:
            await self._run(scope, receive, send_with_id, request_id, lambda: status)
            return
        self._num_requests += 1
        try:
            if self._num_requests > self._max_requests:
                self._metrics.refused.inc()
                await overloaded(self._max_requests).response()(scope, receive, send_with_id)
            else:
                await self._run(scope, receive, send_with_id, request_id, lambda: status)
        finally:
            self._num_requests -= 1
            final = scope["state"].get("stream_status", status or 500)
            self._metrics.requests.labels(endpoint, str(final)).inc()

    async def _run(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, status: Callable[[], int]
    ) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status() == 0:
                await internal_error(request_id).response()(scope, receive, send)


def _final(error: ApiError) -> Response:
    response = error.response()
    if error.status == 413:  # the rest of the body is not read, so the connection cannot be reused
        response.headers["Connection"] = "close"
    return response


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return ApiError(404, f"Unknown route: {method} {path}.", code="unknown_route")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        hint = f" Allowed: {allowed}." if allowed else ""
        return ApiError(
            405, f"The method {method} is not allowed for {path}.{hint}", code="method_not_allowed"
        )
    return ApiError(error.status_code, str(error.detail), code="http_error")


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The body's JSON schema for the OpenAPI page; the handlers read and check the body themselves."""
    schema = model.model_json_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if reference is not None:
            return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inline(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    return schema
