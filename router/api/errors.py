"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from cluster.malformed import UNDECODABLE
from cluster.messages import RequestError
from router.dispatch.waiting_line import LineFullError

_MAX_MESSAGE_CHARACTERS = 2_000
_MAX_PARAM_CHARACTERS = 256


class ApiError(Exception):
    """An error the client is told about.

    ``status`` is the HTTP status, ``code`` is stable, ``param`` is the path of the offending field. What they
    quote of a request is cut where it is long.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,  # seconds
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _shortened(message, _MAX_MESSAGE_CHARACTERS)
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = None if param is None else _shortened(param, _MAX_PARAM_CHARACTERS)
        self.code = code
        self.retry_after = retry_after
        self._headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """How it comes back from another process."""
        return type(self), (self.status, self.message), self.__dict__

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Extra response headers."""
        if self.retry_after is None:
            return self._headers
        return {**self._headers, "Retry-After": str(self.retry_after)}

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(
            msgspec.json.encode(self.body()),
            status_code=self.status,
            headers=self.headers(),
            media_type="application/json",
        )


def _shortened(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}… ({len(text)} characters in all)"


class ClientDisconnectedError(Exception):
    """The client went away before its answer was complete."""


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a feature that was asked for explicitly but does not exist here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    """A 404 that lists what is served."""
    names = ", ".join(repr(name) for name in served) or "none"
    return ApiError(
        404,
        f"The model {model[:200]!r} does not exist. Models served here: {names}.",
        param="model",
        code="model_not_found",
    )


def context_length_exceeded(
    max_model_len: int,
    num_prompt_tokens: int,
    max_tokens: int | None,
    param: str,
    *,
    is_least: bool = False,
) -> ApiError:
    """A 400 with the numbers. ``max_tokens`` None: the caller set no limit on the completion.

    ``is_least``: the prompt has not been tokenized, and has at least so many tokens.
    """
    asked = f"{'at least ' if is_least else ''}{num_prompt_tokens} tokens in the {param}"
    if max_tokens is not None:
        total = num_prompt_tokens + max_tokens
        asked = f"{total} tokens ({asked}, {max_tokens} in the completion)"
    else:
        asked += ", which leaves no room for a completion"
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked}. "
        f"Please reduce the length of the {param} or completion.",
        param=param,
        code="context_length_exceeded",
    )


def no_worker(message: str) -> ApiError:
    """A 503 that may pass when retried."""
    return ApiError(
        503, message, error_type="service_unavailable_error", code="no_worker_available", retry_after=1
    )


def overloaded(error: LineFullError) -> ApiError:
    """A 429 for a full router."""
    return ApiError(
        429,
        f"Too many concurrent requests: {error}. Please retry later.",
        error_type="rate_limit_error",
        code="too_many_requests",
        retry_after=1,
    )


def internal_error(request_id: str) -> ApiError:
    """A 500 that says where to look, without internals."""
    return ApiError(
        500,
        f"Internal error in the router. It is logged under request id {request_id}.",
        error_type="server_error",
        code="internal_error",
    )


_STATUS_OF_WORKER_ERROR: Mapping[str, int] = {
    "invalid_request": 400,
    "invalid_value": 400,
    "context_length_exceeded": 400,
    "prompt_too_long": 400,
    UNDECODABLE: 500,
    "queue_timeout": 429,
    "timeout": 504,
    "deadline": 504,
    "deadline_exceeded": 504,
}


def from_worker(error: RequestError) -> ApiError:
    """How a failed sequence looks to the client: by code; else 503 if retryable, otherwise 502."""
    status = _STATUS_OF_WORKER_ERROR.get(error.code)
    if status is None:
        status = 503 if error.retryable else 502
    error_type = {
        400: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        502: "server_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }[status]
    return ApiError(
        status,
        error.message,
        error_type=error_type,
        code=error.code,
        retry_after=1 if status in (429, 503) else None,
    )


def from_validation(error: ValidationError, body: object) -> ApiError:
    """The first (deepest) problem pydantic found, with the path of the field in ``body``."""
    problems = [(field_path(problem["loc"], body), problem) for problem in error.errors(include_url=False)]
    parts, problem = max(problems, key=lambda item: _progress(item[0], item[1]["loc"]))
    if problem["type"] == "missing":
        message = "This field is required."
    else:
        alternatives: list[str] = []
        for other, candidate in problems:
            if other == parts and _message(candidate) not in alternatives:
                alternatives.append(_message(candidate))
        message = ", or: ".join(alternatives[:4])
    param = format_path(parts)
    where = f"Invalid value for {param!r}: " if param else ""
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_type"
    if problem["type"] in ("value_error", "literal_error") or problem["type"].startswith(
        ("greater_than", "less_than", "too_")
    ):
        code = "invalid_value"
    return ApiError(400, f"{where}{message}", param=param or None, code=code)


def _progress(parts: tuple[int | str, ...], loc: Sequence[int | str]) -> tuple[int, int]:
    # Of a union's branches, the one that got furthest into the value is the one that was meant.
    in_union = len(loc) > len(parts)
    last = parts[-1] if parts else ""
    return len(parts), last if in_union and isinstance(last, int) else -1


def field_path(loc: Sequence[int | str], body: object) -> tuple[int | str, ...]:
    """``loc`` without what pydantic adds for union branches: only the keys that lead through ``body``."""
    parts: list[int | str] = []
    value = body
    for index, key in enumerate(loc):
        if isinstance(key, str) and isinstance(value, dict):
            if key in value:
                value = value[key]
                parts.append(key)
            elif index == len(loc) - 1:  # a missing field
                parts.append(key)
        elif isinstance(key, int) and isinstance(value, list) and key < len(value):
            value = value[key]
            parts.append(key)
    return tuple(parts)


def format_path(parts: Sequence[int | str]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part[:80]  # a client's own key may be as long as the body
            text += f".{name}" if text else name
    return text


def _message(problem: Mapping[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    value = problem.get("input")
    if problem["type"] != "value_error" and isinstance(value, str | int | float | bool | type(None)):
        shown = msgspec.json.encode(value).decode() if not isinstance(value, float) else repr(value)
        message += f" (got {shown[:80]})"
    return message
