"""Where the work on a request's body is done: here if it is small, else where it stops nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from router.api.errors import ApiError, ClientDisconnectedError, no_worker
from router.api.request.body_limits import body_limits
from router.api.request.preparation import PreparationContext, Prepared
from router.api.request.schemas import SamplingFields
from router.api.response.generation import request_timeout_ms
from router.served_model import ModelNotReadyError, ServedModel
from router.services import RouterServices
from text_pipeline.text_model import TextModel

BodyT = TypeVar("BodyT", bound=SamplingFields)

INLINE_BODY_BYTES = 4_096  # costs a few milliseconds at most


async def prepare(
    services: RouterServices,
    request: Request,
    data: bytes,
    received_at: float,
    function: Callable[[TextModel, PreparationContext, bytes], Prepared[BodyT]],
) -> Prepared[BodyT]:
    """What ``function`` makes of the body ``data``; it must be a function of a module, which has a name.

    Raises ApiError, also when the request's deadline passes, and ClientDisconnectedError.
    """
    context = _context(services, request, received_at)
    if len(data) <= INLINE_BODY_BYTES:
        return function(services.text_model, context, data)
    work = asyncio.ensure_future(services.body_workers.run(function, context, data))
    gone = asyncio.ensure_future(_disconnected(request))
    timeout_s = context.timeout_ms / 1000 - (time.perf_counter() - received_at)
    try:
        await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if gone.done():
            raise ClientDisconnectedError
        raise ApiError(
            504,
            f"The request did not finish within its timeout of {context.timeout_ms:.0f} ms.",
            error_type="timeout_error",
            code="timeout",
        )
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _context(services: RouterServices, request: Request, received_at: float) -> PreparationContext:
    model: ServedModel | None = None
    unavailable: ApiError | None = None
    try:
        model = services.served_model()
    except ModelNotReadyError as error:
        unavailable = no_worker(str(error))
    return PreparationContext(
        request_id=request.state.request_id,
        model_name=services.model_name,
        model=model,
        unavailable=unavailable,
        limits=body_limits(services.config),
        hash_groups=services.view.state.pool(services.model_name).groups,
        timeout_ms=request_timeout_ms(request, services.config.request_timeout_ms),
        received_at=received_at,
    )


async def _disconnected(request: Request) -> None:
    # The body has been read to its end, so the next message can only be the disconnect.
    while (await request.receive())["type"] != "http.disconnect":
        pass
