"""Read one request body: bounded, decoded, and checked against its schema."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from router.api.errors import ApiError, ClientDisconnectedError, bad_request, from_validation

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is known to exceed ``max_bytes``."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error
    return b"".join(chunks)


def parse_body(data: bytes, schema: type[Body]) -> Body:
    """Decode and check a JSON body. Raises ApiError (400) that names the field."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request(f"The body must be a JSON object, not {type(body).__name__}.", code="invalid_json")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is too large: at most {max_bytes} bytes are accepted.",
        code="request_too_large",
    )
