"""The listener as clients meet it: bounds in bytes, time and connections, upgrades, and what the log says."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections.abc import Callable
from typing import Any

import pytest

from router.http.server import allow_open_files
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.raw_http import RawClient, exchange
from tests.router.scripted_worker import ScriptedWorker, answer, until

QUICK = 0.05  # seconds; what is tested is that the time ends, not when


async def _connections(router: RunningRouter) -> float:
    return await router.metric("leadout_router_http_connections")


async def test_endless_headers_are_refused(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router()
    with caplog.at_level(logging.INFO, "router"):
        pieces = [b"GET / HTTP/1.1\r\nx-endless: ", *[b"a" * 65_536] * 16]
        [response] = await exchange(router.url, pieces)
    assert response.status == 431
    assert response.error["code"] == "headers_too_large"
    assert "longer than 65536 bytes" in response.error["message"]
    assert await router.metric('leadout_router_http_refused_total{code="headers_too_large"}') == 1
    [line] = [one for one in caplog.records if one.getMessage() == "request refused"]
    fields = vars(line)
    assert fields["status"] == 431
    assert fields["code"] == "headers_too_large"
    assert fields["client"].startswith("127.0.0.1:")
    assert fields["request_id"] == response.headers["x-request-id"]


async def test_too_many_headers_are_refused(start_router: StartRouter) -> None:
    router = await start_router()
    [response] = await exchange(router.url, [b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 101, b"\r\n"])
    assert response.status == 431
    assert "100 header lines" in response.error["message"]


async def test_headers_that_trickle_are_refused(start_router: StartRouter) -> None:
    router = await start_router(http={"receive_timeout_s": QUICK})
    [response] = await exchange(router.url, [b"GET / HTTP/1.1\r\n", b"a: b\r\n"])
    assert response.status == 408
    assert response.error["code"] == "request_timeout"


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"], ids=["nothing", "empty lines"])
async def test_a_connection_without_a_request_is_closed(start_router: StartRouter, sent: bytes) -> None:
    router = await start_router(http={"receive_timeout_s": QUICK})
    assert await exchange(router.url, [sent]) == []


async def test_so_is_one_whose_second_request_never_ends(start_router: StartRouter) -> None:
    router = await start_router(http={"receive_timeout_s": QUICK})
    answers = await exchange(router.url, [b"GET /health HTTP/1.1\r\n\r\nGET /health HTT"])
    assert [one.status for one in answers] == [200, 408]


async def test_so_is_one_whose_body_never_ends_though_it_has_been_answered(start_router: StartRouter) -> None:
    router = await start_router(http={"receive_timeout_s": QUICK})
    answers = await exchange(router.url, [b"GET /health HTTP/1.1\r\nContent-Length: 1000\r\n\r\nabc"])
    assert [one.status for one in answers] == [200]


async def test_a_body_may_come_slowly_but_not_stop(start_router: StartRouter) -> None:
    router = await start_router(receive_timeout_ms=100)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"
    [response] = await exchange(router.url, [head, b'{"model"'])
    assert response.status == 408
    assert response.error["code"] == "request_timeout"
    assert "8 bytes of it had come" in response.error["message"]
    assert await router.metric('leadout_router_requests_total{endpoint="completions",status="408"}') == 1


async def test_a_body_that_trickles_has_the_request_s_deadline(start_router: StartRouter) -> None:
    router = await start_router()
    client = await RawClient.connect(router.url)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\nX-Request-Timeout-Ms: 100\r\n\r\n"
    await client.send(head)

    async def trickle() -> None:
        while True:
            await client.send(b" ")
            await asyncio.sleep(0.005)

    trickling = asyncio.create_task(trickle())
    [response] = await client.until_closed()
    trickling.cancel()
    assert response.status == 408


async def test_the_number_of_connections_is_bounded(start_router: StartRouter) -> None:
    router = await start_router(http={"max_connections": 3})
    assert await _connections(router) == 1  # the one that asks
    others = [await RawClient.connect(router.url) for _ in range(2)]
    while await _connections(router) < 3:
        pass
    [response] = await exchange(router.url, [])
    assert response.status == 503
    assert response.error["code"] == "too_many_connections"
    assert response.headers["retry-after"] == "1"
    others[0].close()
    while await _connections(router) > 2:
        pass
    request = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert [one.status for one in await exchange(router.url, [request])] == [200]
    others[1].close()


def _chat_with_upgrade(upgrade: str) -> bytes:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"{upgrade}Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


@pytest.mark.parametrize(
    "upgrade",
    [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
        "Connection: upgrade\r\nUpgrade: websocket\r\n",
        "Connection: close, Upgrade\r\nUpgrade: h2c\r\n",
    ],
    ids=["as Java sends it", "websocket", "with close"],
)
async def test_an_offer_to_upgrade_is_ignored(
    start_router: StartRouter,
    make_worker: Callable[..., ScriptedWorker],
    caplog: pytest.LogCaptureFixture,
    upgrade: str,
) -> None:
    router = await start_router(make_worker("d0", script=answer([5, 6], finish_reason="length")))
    request = _chat_with_upgrade(upgrade)
    cut = len(request) - 20
    pieces = [request] if "close" in upgrade else [request[:cut], request[cut:], request]
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    answers = await exchange(router.url, [*pieces, last])
    assert [one.status for one in answers] == ([200] if "close" in upgrade else [200, 200, 200])
    assert json.loads(answers[0].body)["usage"]["completion_tokens"] == 2
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]


async def test_what_is_no_http_follows_the_answers_to_what_was(
    start_router: StartRouter, make_worker: Callable[..., ScriptedWorker]
) -> None:
    router = await start_router(make_worker("d0", script=answer([5, 6], finish_reason="length")))
    answers = await exchange(router.url, [_chat_with_upgrade("") + b"garbage\r\n\r\n"])
    assert [one.status for one in answers] == [200, 400]
    assert answers[1].error["code"] == "invalid_http"
    assert answers[1].headers["content-type"] == "application/json"


async def test_http_2_and_connect_are_refused_by_name(start_router: StartRouter) -> None:
    router = await start_router()
    [response] = await exchange(router.url, [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    assert (response.status, response.error["code"]) == (400, "invalid_http")
    assert "HTTP/2" in response.error["message"]
    [response] = await exchange(router.url, [b"CONNECT a:1 HTTP/1.1\r\n\r\n"])
    assert (response.status, response.error["code"]) == (501, "not_implemented")


async def test_a_broken_body_is_refused_and_its_handler_ended(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nno number\r\n"
    )
    with caplog.at_level(logging.INFO):
        [response] = await exchange(router.url, [request])
    assert (response.status, response.error["code"]) == (400, "invalid_http")
    await until(lambda: router.services.queue.num_requests == 0, "the handler's end")
    assert [one.getMessage() for one in caplog.records if one.name.startswith(("router", "uvicorn"))] == [
        "request refused"
    ]


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: calls.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1_000_000))
    assert allow_open_files(4096) == 4096
    assert calls == [(4608, 1_000_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2048))
    assert allow_open_files(4096) == 2048 - 512
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert allow_open_files(4096) == 4096
    assert len(calls) == 2


async def test_clients_that_leave_in_their_headers_leave_nothing(start_router: StartRouter) -> None:
    router = await start_router()
    client = await RawClient.connect(router.url)
    await client.send(b"GET / HTTP/1.1\r\na: ")
    while await _connections(router) < 2:
        pass
    client.close()
    while await _connections(router) > 1:
        pass
