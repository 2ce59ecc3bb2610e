"""The HTTP/1.1 connection: uvicorn's, with bounds on what a client may send and how long it may take.

uvicorn's parser (httptools) takes headers without end, waits for them without end, and loses the body of a
request that offers an upgrade. Here

- a request's line and headers, and a body's trailers, are bounded in bytes and in number: 431;
- they must arrive in time: 408; a connection that sends nothing is closed;
- an offer to upgrade (``h2c``, ``websocket``) is ignored, as RFC 9110 allows, and the request answered;
- what cannot be parsed is refused in the API's error shape, and after the answers to earlier requests of the
  same connection, whose streams it would otherwise break;
- the number of connections is bounded.

The time for a body that a handler reads is the handler's to bound (``api/request_body.py``).
"""

from __future__ import annotations

import asyncio
import http
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.api.errors import ApiError, bad_request
from router.http.rejection_log import Rejection, RejectionLog, address_text
from router.metrics import RouterMetrics

# Bytes parsed at a time. Where a head begins within a piece is not known, so this is by how much the head of
# a request that came together with the one before it may exceed its bound.
_PIECE = 8192
_MAX_UNPARSED = 65_536  # bytes kept of requests that were sent before the one before them was answered
_LINGER_S = 2.0  # for a client that still sends to read its answer: closing at once resets the connection


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Bounds on connections and on what precedes and follows a body."""

    max_header_bytes: int  # request line and headers together
    max_headers: int
    receive_timeout_s: float  # for a request's line and headers
    max_connections: int


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn's class does the parsing of requests and the writing of answers."""

    def __init__(
        self, *args: Any, limits: HttpLimits, metrics: RouterMetrics, rejections: RejectionLog, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._metrics = metrics
        self._rejections = rejections
        self._in_head = False  # a request's first byte has come, its last header has not
        self._in_body = False  # its headers have come, the end of its body has not
        self._num_headers = 0
        self._unfinished = 0  # bytes parsed since a head ended or body came
        self._unparsed = b""
        self._answering: RequestResponseCycle | None = None  # queued ones are in self.pipeline
        self._refusal: ApiError | None = None  # to be answered after all earlier requests
        self._is_deaf = False  # what comes is dropped
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._metrics.http_connections.inc()
        if len(self.connections) > self._limits.max_connections:
            self._is_deaf = True
            self._answer_refusal(_too_many_connections(self._limits.max_connections))
            transport.close()
        else:
            self._arm_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. The request being answered hears of it even if others wait behind it."""
        self._metrics.http_connections.dec()
        self._disarm_deadline()
        self._unparsed = b""
        self.pipeline.clear()
        if self._answering is not None:
            _disconnect(self._answering)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unset_keepalive_if_required()
        if self._is_deaf or self.transport.is_closing():
            return
        if self.pipeline:
            self._keep(self._unparsed + data)
        else:
            self._parse(data)

    def on_message_begin(self) -> None:
        """Parser callback."""
        super().on_message_begin()
        self._in_head = True
        self._num_headers = 0
        self._disarm_deadline()  # that of a silent connection; what is parsed now has its own

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback, for trailers as well. These are counted and dropped: nothing here expects any."""
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            raise _too_large(f"more than {self._limits.max_headers} header lines")
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Parser callback. A request that offers an upgrade comes again, without the offer."""
        if self.parser.get_method() == b"CONNECT":
            raise ApiError(501, "The method CONNECT is not implemented.", code="not_implemented")
        if self.parser.should_upgrade():
            return
        num_queued = len(self.pipeline)
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _AnswerTransport(self.transport, self._end))
        if len(self.pipeline) == num_queued:
            self._answering = self.cycle
        self._in_head, self._in_body = False, True
        self._unfinished = 0
        self._disarm_deadline()

    def on_body(self, body: bytes) -> None:
        """Parser callback."""
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._unfinished = 0
        self._disarm_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer to the oldest request is complete: go on with the next, or with what has come since."""
        following = self.pipeline[-1][0] if self.pipeline else None
        self._answering = following
        super().on_response_complete()  # starts ``following``, or the time that an idle connection has
        if self.transport.is_closing():
            return
        if self._is_deaf:
            self._unset_keepalive_if_required()
            if self._refusal is not None and following is None:
                self._answer_refusal(self._refusal)
                self._linger()
        elif self._unparsed and not self.pipeline:
            data, self._unparsed = self._unparsed, b""
            self._unset_keepalive_if_required()
            self._parse(data)
        elif following is None and (self._in_head or self._in_body):
            self._unset_keepalive_if_required()
            self._arm_deadline()

    def _parse(self, data: bytes) -> None:
        """Parse ``data`` up to a request that must wait for the answer to the one before it."""
        rest = memoryview(data)
        limit = self._limits.max_header_bytes
        try:
            while rest and not self.pipeline:
                piece = rest[: min(_PIECE, limit - self._unfinished)]
                self._unfinished += len(piece)
                rest = rest[self._feed(piece) :]
                if self._unfinished >= limit:
                    raise _too_large(f"longer than {limit} bytes")
        except ApiError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else _not_http(error, self.parser))
        else:
            self._keep(bytes(rest))
            if self._answering is None and not self._in_body:
                self._arm_deadline()

    def _feed(self, piece: memoryview) -> int:
        """Parse ``piece``; returns how many bytes of it. Raises httptools.HttpParserError."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            head = self._head_without_upgrade()
            self.parser = _new_parser(self)  # after "Connection: close" the old one would read no further
            self.parser.feed_data(head)
            parsed: int = offer.args[0]
            return parsed
        return len(piece)

    def _head_without_upgrade(self) -> bytes:
        """The request's head without what made the parser take the rest for another protocol's."""
        lines = [
            b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                lines.append(b"connection: " + b", ".join(t for t in tokens if t.lower() != b"upgrade"))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _keep(self, data: bytes) -> None:
        """Keep what follows a waiting request. Reading goes on, or a client that leaves would be missed."""
        self._unparsed = data
        if len(data) > _MAX_UNPARSED:
            self.flow.pause_reading()
        elif self.pipeline:
            self.flow.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        """Read no further; answer with ``error`` once all earlier requests have been answered."""
        self._is_deaf = True
        self._unparsed = b""
        self._disarm_deadline()
        self.flow.resume_reading()  # what comes is dropped, but the end is noticed
        if self._in_body:  # the request itself is broken
            if self.pipeline:
                self.pipeline.popleft()
            elif self.cycle.response_started:  # but has its answer, or a part
                self._log(error, _new_request_id())
                self.cycle.keep_alive = False
                if self.cycle.response_complete:
                    self._linger()
                return
            else:
                _disconnect(self.cycle)
                self._answering = None
        if self._answering is not None:
            self._refusal = error
        else:
            self._answer_refusal(error)
            self._linger()

    def _end(self) -> None:
        """The answer to a request is complete, and is the last."""
        self.pipeline.clear()
        if self._in_body and not self._is_deaf:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Send no more, and drop what comes until the client has had the time to read."""
        self._is_deaf = True
        self._unparsed = b""
        self._disarm_deadline()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._deadline = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _answer_refusal(self, error: ApiError) -> None:
        request_id = _new_request_id()
        self._log(error, request_id)
        self._unset_keepalive_if_required()
        response = error.response()
        status = http.HTTPStatus(response.status_code)
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode()), *(b"%s: %s" % one for one in headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))

    def _log(self, error: ApiError, request_id: str) -> None:
        assert error.code is not None
        self._metrics.http_refused.labels(error.code).inc()
        self._rejections.add(
            Rejection(
                request_id=request_id,
                client=address_text(self.client),
                route="-",
                status=error.status,
                code=error.code,
            )
        )

    def _arm_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.receive_timeout_s, self._deadline_passed)

    def _disarm_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        self._deadline = None
        if self._in_head:
            self._refuse(
                ApiError(
                    408,
                    "The request's headers were not complete within "
                    f"{self._limits.receive_timeout_s:g} s of its first byte.",
                    code="request_timeout",
                )
            )
        else:
            self.transport.close()


class _AnswerTransport:
    """What the answer to one request is written to: its end may have to wait for the client."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _new_parser(protocol: BoundedHttpProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # to answer what came before
    return parser


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Let the handler believe that the client has left; nothing more of it is sent."""
    cycle.disconnected = True
    cycle.message_event.set()


def _new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _too_large(how: str) -> ApiError:
    return ApiError(
        431,
        f"The request line and headers, or what follows a chunked body, are {how}, the most that is allowed.",
        code="headers_too_large",
    )


def _too_many_connections(limit: int) -> ApiError:
    return ApiError(
        503,
        f"Too many connections: this router keeps at most {limit}. Please retry later.",
        error_type="service_unavailable_error",
        code="too_many_connections",
        retry_after=1,
    )


def _not_http(error: httptools.HttpParserError, parser: httptools.HttpRequestParser) -> ApiError:
    if parser.get_method() == b"PRI":
        return bad_request("HTTP/2 is not spoken here; please use HTTP/1.1.", code="invalid_http")
    return bad_request(f"This is no valid HTTP/1.1 request: {error}.", code="invalid_http")
