"""Read one request body, bounded."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from cluster.config.settings import RouterConfig
from router.api.errors import ApiError, ClientDisconnectedError
from router.api.request.content_encoding import BodyDecoder
from router.api.response.generation import request_timeout_ms


async def read_body(request: Request, config: RouterConfig) -> bytes:
    """The whole body, decompressed.

    Raises ApiError: 413 as soon as it is known to be too large, compressed or not; 408 if the client falls
    silent or the request's deadline passes; 415 or 400 for what ``Content-Encoding`` says; 400 for a bad
    ``X-Request-Timeout-Ms``. Raises ClientDisconnectedError.
    """
    max_bytes = config.max_request_body
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    decoder = BodyDecoder(", ".join(request.headers.getlist("content-encoding")))
    loop = asyncio.get_running_loop()
    silence_s = config.receive_timeout_ms / 1000
    deadline = loop.time() + request_timeout_ms(request, config.request_timeout_ms) / 1000
    body = bytearray()
    num_received = 0
    try:
        async with asyncio.timeout_at(min(loop.time() + silence_s, deadline)) as timeout:
            async for chunk in request.stream():
                timeout.reschedule(min(loop.time() + silence_s, deadline))
                num_received += len(chunk)
                if num_received > max_bytes:
                    raise _too_large(max_bytes)
                for piece in decoder.feed(chunk):
                    body += piece
                    if len(body) > max_bytes:
                        raise _too_large(max_bytes)
                    await asyncio.sleep(0)  # what a body is decompressed to may be a thousand times its size
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error
    except TimeoutError as error:
        raise ApiError(
            408,
            f"The request's body was not complete in time: {num_received} bytes of it had come. A client may "
            f"be silent for {silence_s:g} s, and must be done by the request's deadline.",
            code="request_timeout",
        ) from error
    decoder.finish()
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is too large: at most {max_bytes} bytes are accepted, also once decompressed.",
        code="request_too_large",
    )
