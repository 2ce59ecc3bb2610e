"""The API's description at ``/openapi.json``, for bodies and errors that FastAPI does not see.

Handlers read and check their bodies themselves, within the bounds and with errors in OpenAI's shape.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR = {"description": "An error", "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer: one object, or with `stream` server-sent events",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The description of a JSON body of the shape ``model``."""
    schema = model.model_json_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if reference is not None:
            return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inline(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    return schema
