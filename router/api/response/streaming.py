"""Server-sent events in OpenAI's framing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.errors import ApiError, ClientDisconnectedError, internal_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients pass over
CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it, but the metrics count it


def sse_event(body: dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStreamResponse(Response):
    """Sends events until the iterator ends; an error becomes an error event, and the stream ends.

    ``on_close(reason)`` is called exactly once however the stream ends: "done", "client" (the client went
    away), "error", or "shutdown" (the task was cancelled).
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[str], None],
        *,
        request_id: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream."""
        reason = "shutdown"
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                reason = "done"
            except (ClientDisconnectedError, OSError):
                reason = "client"
                _record(scope, CLIENT_CLOSED_REQUEST)
            except ApiError as error:
                reason = "error"
                _record(scope, error.status)
                await send({"type": "http.response.body", "body": sse_event(error.body()), "more_body": True})
            except Exception:
                reason = "error"
                logger.exception("request %s failed in mid-stream", self._request_id)
                _record(scope, 500)
                body = internal_error(self._request_id).body()
                await send({"type": "http.response.body", "body": sse_event(body), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_close(reason)


def _record(scope: Scope, status: int) -> None:
    # The status line said 200 long ago; the metrics count what became of the request.
    scope.setdefault("state", {})["stream_status"] = status
