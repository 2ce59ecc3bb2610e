"""HTTP as bytes: what a client sends that no library would send, and the answers taken apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httptools
import httpx

from tests.router.scripted_worker import within


@dataclass
class RawResponse:
    """One response, as it came over the wire."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    is_complete: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class _Collector:
    def __init__(self) -> None:
        self.responses: list[RawResponse] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.responses.append(RawResponse())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.responses[-1].headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.responses[-1].status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.responses[-1].body += body

    def on_message_complete(self) -> None:
        self.responses[-1].is_complete = True


def parse_responses(data: bytes) -> list[RawResponse]:
    """The responses in ``data``, which must be nothing else."""
    collector = _Collector()
    collector.parser.feed_data(data)
    assert all(response.is_complete for response in collector.responses)
    return collector.responses


class RawClient:
    """One TCP connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str) -> RawClient:
        """Connect to the server of a base URL."""
        parsed = httpx.URL(url)
        return cls(*await asyncio.open_connection(parsed.host, parsed.port))

    async def send(self, data: bytes) -> None:
        """Send bytes. A server that has closed the connection is no error: its answer may still be read."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            pass

    async def until_closed(self) -> list[RawResponse]:
        """All responses, once the server has ended the connection."""
        data = await within(self._reader.read(), "the end of the connection")
        self.close()
        return parse_responses(data)

    async def read_some(self) -> bytes:
        """The next bytes."""
        data: bytes = await within(self._reader.read(65_536), "more bytes")
        return data

    def close(self) -> None:
        """Leave."""
        self._writer.close()


async def exchange(url: str, pieces: Iterable[bytes]) -> list[RawResponse]:
    """Send ``pieces`` and return the responses, once the server has ended the connection."""
    client = await RawClient.connect(url)
    for piece in pieces:
        await client.send(piece)
    return await client.until_closed()
