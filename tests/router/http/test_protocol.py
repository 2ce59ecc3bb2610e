"""Any bytes in any pieces: the same answers, in order, and at most one refusal, which is the last."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from typing import Any

import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.protocol import BoundedHttpProtocol, HttpLimits
from router.http.rejection_log import RejectionLog
from router.metrics import RouterMetrics
from tests.router.raw_http import RawResponse, parse_responses
from tests.router.scripted_worker import within

LIMITS = HttpLimits(max_header_bytes=1024, max_headers=20, receive_timeout_s=3600, max_connections=100)


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    try:
        body = await request.body()
    except ClientDisconnect:
        return
    seen = [request.method, request.url.path, request.headers.getlist("x-mark"), body.decode("latin-1")]
    await JSONResponse(seen)(scope, receive, send)


def _protocol() -> BoundedHttpProtocol:
    config = uvicorn.Config(_echo, lifespan="off", ws="none", log_config=None, access_log=False)
    return BoundedHttpProtocol(
        config=config,
        server_state=ServerState(),
        app_state={},
        limits=LIMITS,
        metrics=RouterMetrics(),
        rejections=RejectionLog(),
    )


async def _answers(pieces: list[bytes], turns: list[bool]) -> list[RawResponse]:
    """What is answered to ``pieces``; where ``turns``, over and over, says so, others run after a piece."""
    transport, protocol = _Transport(), _protocol()
    protocol.connection_made(transport)
    for piece, has_turn in zip(pieces, itertools.cycle(turns), strict=False):
        while transport.is_paused and not transport.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        protocol.data_received(piece)
        if has_turn:
            await asyncio.sleep(0)
    while protocol.tasks:
        await within(asyncio.gather(*protocol.tasks), "the handlers")
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return parse_responses(transport.written)


@dataclass(frozen=True)
class _Sent:
    """A request as bytes; ``refused`` 0: it is answered with ``echo``, else its refusal's status."""

    data: bytes
    echo: list[Any]
    refused: int = 0


_NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(lambda name: f"x-{name}")
_VALUES = st.text("abcXYZ019 ,;=/\"'", max_size=40).map(str.strip)
_BODIES = st.binary(max_size=300) | st.sampled_from([b"GET /other HTTP/1.1\r\n\r\n", b"\r\n\r\n" * 40])
_UPGRADES = st.sampled_from(
    [
        [],
        [],
        ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"],
        ["connection: keep-alive, upgrade", "upgrade: websocket"],
    ]
)


@st.composite
def _requests(draw: st.DrawFn) -> _Sent:
    method = draw(st.sampled_from(["GET", "POST", "PUT"]))
    path = "/" + draw(st.text("abc/", max_size=20)).strip("/")
    mark = draw(st.text("0123456789", min_size=1, max_size=9))
    lines = [f"{name}: {value}" for name, value in draw(st.lists(st.tuples(_NAMES, _VALUES), max_size=6))]
    lines += [*draw(_UPGRADES), f"X-Mark: {mark}"]
    flaw = draw(st.sampled_from([None] * 12 + ["long", "many", "no-http", "bad-chunk", "endless-trailer"]))
    refused = {"long": 431, "many": 431, "no-http": 400, "bad-chunk": 400, "endless-trailer": 431}.get(
        flaw or "", 0
    )
    if flaw == "long":
        lines.append("x-long: " + "a" * 3 * LIMITS.max_header_bytes)
    elif flaw == "many":
        lines += ["x-many: a"] * (LIMITS.max_headers + 1)
    elif flaw == "no-http":
        lines.insert(0, "no header")
    body, encoded = b"", b""
    if method != "GET" or flaw in ("bad-chunk", "endless-trailer"):
        body = draw(_BODIES)
        if flaw in ("bad-chunk", "endless-trailer") or draw(st.booleans()):
            lines.append("Transfer-Encoding: chunked")
            size = draw(st.integers(1, 50))
            parts = [body[start : start + size] for start in range(0, len(body), size)]
            encoded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
            encoded += {
                "bad-chunk": b"no number\r\n",
                "endless-trailer": b"0\r\nx-end: " + b"a" * 3 * LIMITS.max_header_bytes,
            }.get(flaw or "", draw(st.sampled_from([b"0\r\n\r\n", b"0\r\nX-Mark: trailer\r\n\r\n"])))
        else:
            lines.append(f"Content-Length: {len(body)}")
            encoded = body
    lines = draw(st.permutations(lines)) if flaw is None else lines
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()
    before = draw(st.sampled_from([b"", b"", b"\r\n"]))
    return _Sent(before + head + encoded, [method, path, [mark], body.decode("latin-1")], refused)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(_requests(), min_size=1, max_size=5))
def test_how_the_bytes_are_cut_does_not_matter(data: st.DataObject, requests: list[_Sent]) -> None:
    sent = b"".join(request.data for request in requests)
    cuts = sorted(data.draw(st.lists(st.integers(1, len(sent)), max_size=12), label="cuts"))
    every = data.draw(st.sampled_from([None, None, None, 1, 7, 100]), label="every")
    if every is not None:
        cuts = list(range(every, len(sent), every))
    pieces = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    turns = data.draw(st.lists(st.booleans(), min_size=1, max_size=8), label="turns, over and over")
    answers = asyncio.run(_answers([piece for piece in pieces if piece], turns))
    for request, answer in zip(requests, answers, strict=False):
        if request.refused:
            assert answer.status == request.refused
            assert answer.headers["connection"] == "close"
            assert answer is answers[-1]
            return
        assert answer.status == 200, answer.body
        assert json.loads(answer.body) == request.echo
    assert len(answers) == len(requests)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=80), max_size=8))
def test_any_bytes_end_in_nothing_worse_than_a_refusal(pieces: list[bytes]) -> None:
    answers = asyncio.run(_answers(pieces, [True]))
    assert [answer.status for answer in answers] in ([], [400])


async def _head_of_size(num_bytes: int) -> list[int]:
    start = b"GET / HTTP/1.1\r\nx-fill: "
    data = start + b"a" * (num_bytes - len(start) - 4) + b"\r\n\r\n"
    assert len(data) == num_bytes
    return [answer.status for answer in await _answers([data], [True])]


async def test_the_bound_of_a_head_is_exact_for_the_first_of_a_connection() -> None:
    assert await _head_of_size(LIMITS.max_header_bytes) == [200]
    assert await _head_of_size(LIMITS.max_header_bytes + 1) == [431]


async def test_a_request_is_told_that_its_client_left_while_another_waits_behind_it() -> None:
    seen: list[str] = []
    has_begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        while (message := await receive())["type"] == "http.request":
            pass
        seen.append(scope["path"] + " " + message["type"])

    protocol = _protocol()
    protocol.app = app
    transport = _Transport()
    protocol.connection_made(transport)
    protocol.data_received(b"GET /first HTTP/1.1\r\n\r\n" + b"GET /next HTTP/1.1\r\n\r\n" * 3)
    await within(has_begun.wait(), "the first request")
    assert not transport.is_paused  # or the end of the connection would not be noticed
    protocol.connection_lost(None)
    await within(asyncio.gather(*protocol.tasks), "the handlers")
    assert seen == ["/first http.disconnect"]


async def test_what_is_sent_ahead_is_bounded() -> None:
    """Requests that come while one is answered wait in the sockets' buffers, not here."""
    protocol = _protocol()
    has_begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    protocol.app = app
    transport = _Transport()
    protocol.connection_made(transport)
    request = b"GET / HTTP/1.1\r\n\r\n"
    while not transport.is_paused:
        protocol.data_received(request * 1000)
        assert len(protocol.pipeline) <= LIMITS.max_header_bytes // len(request)
    for task in protocol.tasks:
        task.cancel()
    await asyncio.gather(*protocol.tasks, return_exceptions=True)
    protocol.connection_lost(None)
