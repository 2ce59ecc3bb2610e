"""Run one dispatched request to its HTTP response, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.messages import TokenLogprobs
from router.api.errors import ApiError, ClientDisconnectedError
from router.api.request.generation_spec import GenerationSpec
from router.api.request.schemas import SamplingFields, StreamOptions
from router.api.response.choices import ChoiceDelta
from router.api.response.generation import ActiveGeneration
from router.api.response.silence_timer import SilenceTimer
from router.api.response.streaming import (
    CLIENT_CLOSED_REQUEST,
    DONE,
    KEEP_ALIVE,
    EventStreamResponse,
    sse_event,
)
from router.services import RouterServices


@dataclass(kw_only=True)
class FinishedChoice:
    """One choice's whole answer."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Shape(Protocol):
    """How one endpoint writes its choices. One per request: it may keep what streamed choices need."""

    whole_object: str  # "object" of a whole answer
    chunk_object: str  # and of a chunk

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        """A finished choice as an element of ``choices``."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a streamed choice begins with, before its first text."""
        ...

    def pieces(self, index: int, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """What a delta adds to a streamed choice; each becomes a chunk."""
        ...


async def respond(
    services: RouterServices, spec: GenerationSpec, request: Request, body: SamplingFields, shape: Shape
) -> Response:
    """Dispatch ``spec`` and answer ``body``, streamed or whole.

    A stream's headers wait for its first output, so that a request which fails before it is answered with
    the right status, but no longer than a stream may be silent. Raises ApiError.
    """
    is_explained = request.headers.get("x-leadout-explain", "").lower() in ("1", "true")
    active = ActiveGeneration(services, spec, request, is_explained=is_explained)
    reason = "shutdown"
    keep = False
    silence = SilenceTimer(services.config.sse_keepalive_ms / 1000 if body.stream else 0, active.nudge)

    def close(reason: str) -> None:
        silence.close()
        active.close(reason)

    try:
        if body.stream:
            events = _events(active, shape, body.stream_options or StreamOptions(), is_explained)
            first = await anext(events)
            response: Response = EventStreamResponse(
                _watched(first, events, silence), close, request_id=spec.request_id
            )
            keep = True  # the response closes it
        else:
            content = await _whole(active, shape, is_explained)
            response = Response(msgspec.json.encode(content), media_type="application/json")
            reason = "done"
    except ClientDisconnectedError:
        reason = "client"
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except ApiError:
        reason = "error"
        raise
    finally:
        if not keep:
            close(reason)
    response.headers["x-leadout-request-id"] = spec.request_id
    plan = active.plan
    if plan is not None and is_explained:
        response.headers["x-leadout-plan"] = msgspec.json.encode(plan.explain()).decode("latin-1")
    return response


async def _whole(active: ActiveGeneration, shape: Shape, is_explained: bool) -> dict[str, Any]:
    choices = [FinishedChoice() for _ in range(active.spec.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async for arrived in active.deltas():
        if arrived is None:
            continue
        index, delta = arrived
        texts[index].append(delta.text)
        choices[index].logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            choices[index].finish_reason = delta.finish_reason
            choices[index].stop_reason = delta.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return {
        **_envelope(active.spec, shape.whole_object),
        "choices": [shape.whole(index, choice) for index, choice in enumerate(choices)],
        "usage": active.usage.body(),
        **({"leadout": active.usage.explanation()} if is_explained else {}),
    }


async def _events(
    active: ActiveGeneration, shape: Shape, options: StreamOptions, is_explained: bool
) -> AsyncIterator[bytes]:
    """The stream's events. Nothing but comments comes before the first output."""
    envelope = _envelope(active.spec, shape.chunk_object)

    def chunk(choice: dict[str, Any]) -> bytes:
        body = {**envelope, "choices": [choice]}
        if options.continuous_usage_stats:
            body["usage"] = active.usage.body()
        elif options.include_usage:
            body["usage"] = None
        return sse_event(body)

    is_open = False
    async for arrived in active.deltas():
        if arrived is None:
            yield KEEP_ALIVE
            continue
        if not is_open:
            is_open = True
            for index in range(active.spec.num_choices):
                opening = shape.opening(index)
                if opening is not None:
                    yield chunk(opening)
        for piece in shape.pieces(*arrived):
            yield chunk(piece)
    if options.include_usage or is_explained:
        last = {**envelope, "choices": []}
        if options.include_usage:
            last["usage"] = active.usage.body()
        if is_explained:
            last["leadout"] = active.usage.explanation()
        yield sse_event(last)
    yield DONE


async def _watched(first: bytes, rest: AsyncIterator[bytes], silence: SilenceTimer) -> AsyncIterator[bytes]:
    """All events; the next one is asked for when one has been sent."""
    yield first
    silence.restart()
    async for event in rest:
        yield event
        silence.restart()


def _envelope(spec: GenerationSpec, kind: str) -> dict[str, Any]:
    return {
        "id": spec.response_id,
        "object": kind,
        "created": spec.created,
        "model": spec.model.name,
        "system_fingerprint": spec.system_fingerprint,
    }
