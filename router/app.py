"""The HTTP application: routes, and errors in one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.api import health
from router.api.chat import chat_completions
from router.api.cluster import DrainRequest, FlipRequest, cluster_state, drain_worker, flip_worker
from router.api.completions import completions
from router.api.errors import ApiError, ClientDisconnectedError
from router.api.models import get_model, list_models
from router.api.operator_access import check_operator
from router.api.request.json_body import parse_body
from router.api.request.request_body import read_body
from router.api.request.schemas import ChatCompletionRequest, CompletionRequest
from router.api.response.streaming import CLIENT_CLOSED_REQUEST
from router.http.request_middleware import RequestMiddleware, method_of, record_error
from router.openapi import ERRORS, EVENT_STREAM, body_schema
from router.services import RouterServices

_HEADERS_FOR_PAGES = ["X-Request-Id", "X-Leadout-Request-Id", "X-Leadout-Plan", "Retry-After"]


def create_app(
    services: RouterServices, *, cors_origins: Sequence[str] = (), allowed_hosts: Sequence[str] = ()
) -> FastAPI:
    """The ASGI application over ``services``.

    Pages of ``cors_origins`` may use it from a browser; operator's actions are open to requests to
    ``allowed_hosts`` and to names that no page can point at this router.
    """
    # Like FastAPI, but the page at /docs loads its script from here.
    app = FastAPIOffline(redoc_url=None, title="Leadout", version=health.leadout_version(), responses=ERRORS)

    @app.post(
        "/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest), responses=EVENT_STREAM
    )
    async def post_chat_completions(request: Request) -> Response:
        return await chat_completions(services, request)

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest), responses=EVENT_STREAM)
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

    @app.post("/cluster/workers/{worker}/drain", status_code=202, openapi_extra=body_schema(DrainRequest))
    async def post_drain(worker: str, request: Request) -> dict[str, Any]:
        check_operator(request, allowed_hosts)
        body = parse_body(await read_body(request, services.config), DrainRequest)
        return drain_worker(services, worker, force=body.force)

    @app.post("/cluster/workers/{worker}/role", status_code=202, openapi_extra=body_schema(FlipRequest))
    async def post_role(worker: str, request: Request) -> dict[str, Any]:
        check_operator(request, allowed_hosts)
        body = parse_body(await read_body(request, services.config), FlipRequest)
        return flip_worker(services, worker, body.role, force=body.force)

    @app.get("/health")
    async def get_health() -> dict[str, Any]:
        return health.health(services)

    @app.get("/ping")
    async def get_ping() -> dict[str, Any]:
        return health.health(services)

    @app.post("/ping")
    async def post_ping() -> dict[str, Any]:
        return health.health(services)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": health.leadout_version()}

    @app.get("/load")
    async def get_load() -> dict[str, int]:
        return health.load(services)

    @app.get("/ready")
    async def get_ready() -> JSONResponse:
        status, body = health.readiness(services)
        return JSONResponse(body, status_code=status)

    @app.get("/metrics", response_class=Response)
    async def get_metrics() -> Response:
        return Response(health.metrics(services), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        record_error(request, error)
        response = error.response()
        if error.status in (408, 413):  # the rest of the body is not read, so the connection cannot be reused
            response.headers["Connection"] = "close"
        return response

    @app.exception_handler(ClientDisconnectedError)
    async def on_disconnect(request: Request, error: ClientDisconnectedError) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _allowed_methods(app, request)
            if method_of(request) == "OPTIONS":
                return Response(status_code=204, headers=headers)
        api_error = _routing_error(request, error, headers)
        record_error(request, api_error)
        response = api_error.response()
        response.headers.update(headers)
        return response

    app.add_middleware(RequestMiddleware, services=services)
    if cors_origins:
        # Outermost, so that a page can also read what the middleware refuses.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],  # those that are asked for: clients of other makers bring their own
            expose_headers=_HEADERS_FOR_PAGES,
        )
    return app


def _allowed_methods(app: FastAPI, request: Request) -> str:
    """All methods of the path, of whatever route."""
    methods: set[str] = {"OPTIONS"}
    for route in app.router.routes:
        match, _ = route.matches(request.scope)
        if match.value:
            methods |= getattr(route, "methods", None) or {"GET"}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _routing_error(request: Request, error: HTTPException, headers: dict[str, str]) -> ApiError:
    method, path = method_of(request), request.url.path
    if error.status_code == 404:
        return ApiError(404, f"Unknown route: {method} {path}.", code="unknown_route")
    if error.status_code == 405:
        return ApiError(
            405,
            f"The method {method} is not allowed for {path}. Allowed: {headers['Allow']}.",
            code="method_not_allowed",
        )
    return ApiError(error.status_code, str(error.detail), code="http_error")
