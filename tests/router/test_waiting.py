"""Requests that wait for others to end, from HTTP to the worker's socket and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster.messages import Generate
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import EOS, ScriptedWorker, answer, until, within

MakeWorker = Callable[..., ScriptedWorker]
ONE_PLACE = {"max_concurrent_requests": 1, "max_waiting_requests": 2}


class Gate:
    """Answers wait until it is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def script(self, message: Generate) -> AsyncIterator[dict[str, Any]]:
        await self.is_open.wait()
        async for fields in answer([5, EOS])(message):
            yield fields


@pytest.fixture
async def gate() -> Gate:
    return Gate()


def post(router: RunningRouter, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(
        router.post("completions", {"model": MODEL, "prompt": "hi", "max_tokens": 9, **fields})
    )


async def waiting(router: RunningRouter, number: int) -> None:
    await until(lambda: router.services.queue.line.num_waiting == number, f"{number} in line")


def marks(worker: ScriptedWorker) -> list[str]:
    """The salts of the requests that the worker was sent, which tell them apart."""
    return [message.spec.cache_salt for message in worker.generates]


async def test_requests_beyond_the_places_are_served_in_turn(
    start_router: StartRouter, make_worker: MakeWorker, gate: Gate
) -> None:
    worker = make_worker(script=gate.script)
    router = await start_router(worker, **ONE_PLACE)
    tasks = [post(router, cache_salt="first")]
    await until(lambda: len(worker.generates) == 1, "the first one on its worker")
    tasks.append(post(router, cache_salt="normal"))
    await waiting(router, 1)
    tasks.append(post(router, cache_salt="urgent", priority=-1, stream=True))
    await waiting(router, 2)
    refused = await router.post("completions", {"model": MODEL, "prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert refused.headers["retry-after"] == "1"
    assert marks(worker) == ["first"]
    gate.is_open.set()
    responses = await within(asyncio.gather(*tasks), "all answers")
    assert [response.status_code for response in responses] == [200, 200, 200]
    assert marks(worker) == ["first", "urgent", "normal"]
    router.assert_idle()


async def test_a_request_that_waits_too_long_gets_a_429(
    start_router: StartRouter, make_worker: MakeWorker, gate: Gate
) -> None:
    worker = make_worker(script=gate.script)
    router = await start_router(worker, **ONE_PLACE, max_wait_ms=20)
    first = post(router)
    await until(lambda: len(worker.generates) == 1, "the first one on its worker")
    for is_stream in (False, True):
        response = await within(post(router, stream=is_stream), "the end of its patience")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_timeout")
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
    gate.is_open.set()
    assert (await within(first, "the first one")).status_code == 200
    router.assert_idle()


async def test_a_client_that_leaves_the_line_is_forgotten(
    start_router: StartRouter, make_worker: MakeWorker, gate: Gate
) -> None:
    worker = make_worker(script=gate.script)
    router = await start_router(worker, **ONE_PLACE)
    first = post(router)
    await until(lambda: len(worker.generates) == 1, "the first one on its worker")
    second = post(router)
    await waiting(router, 1)
    second.cancel()
    await waiting(router, 0)
    gate.is_open.set()
    assert (await within(first, "the first one")).status_code == 200
    await until(lambda: router.services.queue.num_requests == 0, "the end of both")
    assert len(worker.generates) == 1
    assert worker.cancels == []
    router.assert_idle()


async def test_a_stream_that_waits_gives_signs_of_life(
    start_router: StartRouter, make_worker: MakeWorker, gate: Gate
) -> None:
    worker = make_worker(script=gate.script)
    router = await start_router(worker, **ONE_PLACE, sse_keepalive_ms=10)
    first = post(router)
    await until(lambda: len(worker.generates) == 1, "the first one on its worker")
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 9, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        assert await within(anext(lines), "a sign of life") == ": keep-alive"
        assert router.services.queue.line.num_waiting == 1
        gate.is_open.set()
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]
    assert (await within(first, "the first one")).status_code == 200
    router.assert_idle()


@pytest.mark.parametrize("priority", ["high", 1.5, True, 2**63])
async def test_a_priority_is_a_number(
    start_router: StartRouter, make_worker: MakeWorker, priority: Any
) -> None:
    router = await start_router(make_worker(script=answer([5, EOS])))
    response = await post(router, priority=priority)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
