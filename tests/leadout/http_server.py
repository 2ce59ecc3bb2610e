"""A small real HTTP server whose answers a test writes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What the server sends. The pieces of a stream go out as one HTTP chunk each."""

    status: int = 200
    pieces: Sequence[str] = ()
    content_type: str = "application/json"
    is_stream: bool = False
    breaks_off: bool = False  # closes the connection within the stream


@dataclass(frozen=True)
class Request:
    """What the server got."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: Any


@dataclass
class ScriptedServer:
    """Answers each request with what ``respond`` returns, and keeps the requests in order of arrival."""

    url: str
    requests: list[Request] = field(default_factory=list)

    def bodies(self) -> list[Any]:
        """The JSON bodies of all POST requests."""
        return [request.body for request in self.requests if request.method == "POST"]


def as_json(value: Any, status: int = 200) -> Answer:
    """A plain JSON answer."""
    return Answer(status, [json.dumps(value)])


def event_stream(*events: Any, done: bool = True, breaks_off: bool = False) -> Answer:
    """Server-sent events with a JSON value each; text is sent as it is."""
    pieces = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    if done:
        pieces.append("data: [DONE]\n\n")
    return Answer(200, pieces, "text/event-stream", is_stream=True, breaks_off=breaks_off)


@contextlib.contextmanager
def scripted_server(respond: Callable[[Request], Answer]) -> Iterator[ScriptedServer]:
    """Runs the server while the context lasts. ``respond`` is called in one thread per connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            del format, args

        def _answer(self, body: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, body)
            server.requests.append(request)
            answer = respond(request)
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            if not answer.is_stream:
                content = "".join(answer.pieces).encode()
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in answer.pieces:
                data = piece.encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            if answer.breaks_off:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # so that many connections at once are all accepted at once

    http_server = Server(("127.0.0.1", 0), Handler)
    server = ScriptedServer(f"http://127.0.0.1:{http_server.server_address[1]}")
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http_server.shutdown()
        thread.join()
        http_server.socket.close()
