"""Run one dispatched request to its HTTP response, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.messages import TokenLogprobs
from router.api.choices import ChoiceDelta
from router.api.errors import ApiError, ClientDisconnectedError
from router.api.generation import ActiveGeneration, GenerationSpec
from router.api.streaming import CLIENT_CLOSED_REQUEST, EventStreamResponse
from router.services import RouterServices

Deltas = AsyncIterator[list[tuple[int, ChoiceDelta]]]


@dataclass(kw_only=True)
class FinishedChoice:
    """One choice's whole answer."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def respond(
    services: RouterServices,
    spec: GenerationSpec,
    request: Request,
    *,
    stream: bool,
    events: Callable[[ActiveGeneration, Deltas], AsyncIterator[bytes]],
    body: Callable[[ActiveGeneration, list[FinishedChoice]], dict[str, Any]],
) -> Response:
    """Dispatch ``spec`` and answer with ``events`` (streamed) or ``body`` (whole).

    A stream's headers wait for the first output, so that a request which fails before it is answered with
    the right status. Raises ApiError.
    """
    active = ActiveGeneration(services, spec, request)
    reason = "shutdown"
    keep = False
    try:
        deltas = active.deltas()
        if stream:
            first: list[tuple[int, ChoiceDelta]] = await anext(deltas, [])
            response: Response = EventStreamResponse(
                events(active, _chain(first, deltas)), active.close, request_id=spec.response_id
            )
            keep = True  # the response closes it
        else:
            choices = await _collect(deltas, spec.num_choices)
            response = Response(msgspec.json.encode(body(active, choices)), media_type="application/json")
            reason = "done"
    except ClientDisconnectedError:
        reason = "client"
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except ApiError:
        reason = "error"
        raise
    finally:
        if not keep:
            active.close(reason)
    response.headers["x-leadout-request-id"] = spec.response_id
    plan = active.plan
    if plan is not None and request.headers.get("x-leadout-explain", "").lower() in ("1", "true"):
        response.headers["x-leadout-plan"] = msgspec.json.encode(plan.explain()).decode("latin-1")
    return response


async def _collect(deltas: Deltas, num_choices: int) -> list[FinishedChoice]:
    choices = [FinishedChoice() for _ in range(num_choices)]
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    async for batch in deltas:
        for index, delta in batch:
            texts[index].append(delta.text)
            choices[index].logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                choices[index].finish_reason = delta.finish_reason
                choices[index].stop_reason = delta.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return choices


async def _chain(first: list[tuple[int, ChoiceDelta]], rest: Deltas) -> Deltas:
    if first:
        yield first
    async for batch in rest:
        yield batch
