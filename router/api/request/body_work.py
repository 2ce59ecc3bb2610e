"""Where the work on a request's body is done: here if it is small, else where it stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import Request

from router.api.errors import ApiError, ClientDisconnectedError, no_worker
from router.api.request.body_limits import body_limits
from router.api.request.preparation import PreparationContext, Prepared
from router.api.request.schemas import SamplingFields
from router.api.response.generation import request_timeout_ms
from router.body_workers import BodyNotPreparedError, TooManyBodiesError
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
    function: Callable[[Mapping[str, TextModel], PreparationContext, bytes], Prepared[BodyT]],
) -> Prepared[BodyT]:
    """What ``function`` makes of the body ``data``; it must be a function of a module, which has a name.

    Raises ApiError, also when the request's deadline passes, and ClientDisconnectedError.
    """
    context = _context(services, request, received_at)
    if len(data) <= INLINE_BODY_BYTES:
        return function(services.text_models, context, data)
    work = asyncio.ensure_future(services.body_workers.run(function, context, data, expected=ApiError))
    gone = asyncio.ensure_future(_disconnected(request))
    timeout_s = context.timeout_ms / 1000 - (services.clock.monotonic() - received_at)
    try:
        await asyncio.wait({work, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return _result(work)
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
    return PreparationContext(
        request_id=request.state.request_id,
        models={name: _served_model(services, name) for name in services.models},
        limits=body_limits(services.config),
        timeout_ms=request_timeout_ms(request, services.config.request_timeout_ms),
        received_at=received_at,
    )


def _served_model(services: RouterServices, name: str) -> ServedModel | ApiError:
    try:
        return services.served_model(name)
    except ModelNotReadyError as error:
        return no_worker(str(error))


def _result(work: asyncio.Future[Prepared[BodyT]]) -> Prepared[BodyT]:
    try:
        return work.result()
    except TooManyBodiesError as error:
        raise ApiError(
            429,
            f"Too many large requests: {error}. Please retry later.",
            error_type="rate_limit_error",
            code="too_many_requests",
            retry_after=1,
        ) from error
    except BodyNotPreparedError as error:
        raise ApiError(
            503,
            "The request's body could not be worked on. Please retry.",
            error_type="service_unavailable_error",
            code="body_not_prepared",
            retry_after=1,
        ) from error


async def _disconnected(request: Request) -> None:
    # The body has been read to its end, so the next message can only be the disconnect.
    while (await request.receive())["type"] != "http.disconnect":
        pass
