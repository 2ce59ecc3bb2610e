"""What happens around every request: its id, HEAD, the bound, metrics, the log of refusals, and a 500."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import ApiError, internal_error, overloaded
from router.api.response.streaming import CLIENT_CLOSED_REQUEST
from router.dispatch.waiting_line import LineFullError
from router.http.rejection_log import Rejection, address_text
from router.services import RouterServices

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class RequestMiddleware:
    """Gives each request its id, bounds and counts them, and turns unexpected exceptions into a 500.

    Plain ASGI, because a middleware that wraps ``receive`` would hide disconnects from the handlers.
    """

    def __init__(self, app: ASGIApp, services: RouterServices) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "method": scope["method"]}
        if scope["method"] == "HEAD":
            # Answered like GET. The server, which has its own copy, knows to leave the body out.
            scope = {**scope, "method": "GET"}
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        endpoint = _ENDPOINTS.get(scope["path"])
        has_entered = False
        try:
            if endpoint is not None:
                self._services.queue.enter()
                has_entered = True
            await self._app(scope, receive, send_with_id)
        except LineFullError as error:
            await _answer(overloaded(error), scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status == 0:
                await _answer(internal_error(request_id), scope, receive, send_with_id)
        finally:
            if status >= 400 and status != CLIENT_CLOSED_REQUEST:
                self._services.rejections.add(_rejection(scope, status))
            if has_entered:
                self._services.queue.exit()
            if endpoint is not None:
                final = state.get("stream_status", status or 500)
                self._services.metrics.requests.labels(endpoint, str(final)).inc()


def record_error(request: Request, error: ApiError) -> None:
    """Have the log of refused requests say what ``error`` says, except its message."""
    request.state.error = error


def method_of(request: Request) -> str:
    """The method as the client sent it."""
    method: str = request.state.method
    return method


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    record_error(Request(scope), error)
    await error.response()(scope, receive, send)


def _rejection(scope: Scope, status: int) -> Rejection:
    state: dict[str, Any] = scope["state"]
    error: ApiError | None = state.get("error")
    # The template names what was called; a path as it came is percent-encoded, so one line.
    route = getattr(scope.get("route"), "path", None) or scope["raw_path"].decode("latin-1")
    return Rejection(
        request_id=state["request_id"],
        client=address_text(scope.get("client")),
        route=f"{state['method']}:{route}",
        status=status,
        code=None if error is None else error.code,
        param=None if error is None else error.param,
    )
