"""``POST /v1/completions``, OpenAI's legacy endpoint."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.api.request.body_work import prepare
from router.api.request.preparation import prepare_completion
from router.api.request.request_body import read_body
from router.api.response.completion_shape import CompletionShape
from router.api.response.respond import respond
from router.services import RouterServices


async def completions(services: RouterServices, request: Request) -> Response:
    """Answer one request. Raises ApiError."""
    received_at = services.clock.monotonic()
    data = await read_body(request, services.config)
    prepared = await prepare(services, request, data, received_at, prepare_completion)
    services.metrics.tokenize_time.labels("completions").observe(services.clock.monotonic() - received_at)
    tokenizer = services.tokenizer(prepared.spec.model)
    shape = CompletionShape(tokenizer, prepared.spec, prepared.body, prepared.echo)
    return await respond(services, prepared.spec, request, prepared.body, shape)
