"""Decode a JSON body and check it against its schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from router.api.errors import bad_request, from_validation

Body = TypeVar("Body", bound=BaseModel)


def parse_body(
    data: bytes, schema: type[Body], check: Callable[[dict[str, Any]], None] = lambda body: None
) -> Body:
    """The body as ``schema`` says. ``check`` sees it first, while it is plain JSON, and may refuse it.

    Raises ApiError (400) that names the field.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request(f"The body must be a JSON object, not {type(body).__name__}.", code="invalid_json")
    check(body)
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from error
