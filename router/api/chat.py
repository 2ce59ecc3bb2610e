"""``POST /v1/chat/completions``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.api.request.body_work import prepare
from router.api.request.preparation import prepare_chat
from router.api.request.request_body import read_body
from router.api.response.chat_shape import ChatShape
from router.api.response.respond import respond
from router.services import RouterServices


async def chat_completions(services: RouterServices, request: Request) -> Response:
    """Answer one request. Raises ApiError."""
    received_at = services.clock.monotonic()
    data = await read_body(request, services.config)
    prepared = await prepare(services, request, data, received_at, prepare_chat)
    services.metrics.tokenize_time.labels("chat").observe(services.clock.monotonic() - received_at)
    shape = ChatShape(services.tokenizer(prepared.spec.model), prepared.body)
    return await respond(services, prepared.spec, request, prepared.body, shape)
