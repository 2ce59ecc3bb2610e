"""Comments in streams that would say nothing, from HTTP to the worker's socket and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import (
    EOS,
    Script,
    ScriptedWorker,
    answer,
    failing,
    silent,
    timings,
    until,
    within,
)
from text_pipeline.tokenizer import Tokenizer

MakeWorker = Callable[..., ScriptedWorker]
BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 100, "stream": True}
OFTEN = {"sse_keepalive_ms": 10}
COMMENT = ": keep-alive"


class Gates:
    """Scripts that go on when the test says so."""

    def __init__(self) -> None:
        self.before = asyncio.Event()
        self.within = asyncio.Event()

    def around(self, token_ids: list[int], script: Script) -> Script:
        """Waits, sends ``token_ids``, waits again, and goes on with ``script``."""

        async def gated(message: Any) -> AsyncIterator[dict[str, Any]]:
            await self.before.wait()
            for index, token_id in enumerate(token_ids):
                more = {} if index else {"timings": timings(message.spec.prompt_token_ids)}
                yield {"token_ids": [token_id], **more}
            await self.within.wait()
            async for fields in script(message):
                yield fields

        return gated


@pytest.fixture
async def gates() -> Gates:
    return Gates()


async def comments(lines: AsyncIterator[str], count: int) -> None:
    """Read so many comments, which must come next."""
    for _ in range(count):
        assert await anext(lines) == COMMENT
        assert await anext(lines) == ""


async def data(lines: AsyncIterator[str]) -> list[Any]:
    """The JSON bodies up to the end."""

    async def read() -> list[Any]:
        return [
            json.loads(line.removeprefix("data: "))
            async for line in lines
            if line.startswith("data: ") and line != "data: [DONE]"
        ]

    result: list[Any] = await within(read(), "the end of the stream")
    return result


def stream(router: RunningRouter, path: str = "completions", **fields: Any) -> Any:
    return router.http.stream("POST", f"/v1/{path}", json={**BODY, **fields})


async def test_a_stream_begins_with_comments_and_has_them_in_its_middle(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer, gates: Gates
) -> None:
    one, two = tokenizer.encode(" one two")
    script = gates.around([one], answer([two, EOS]))
    router = await start_router(make_worker(script=script), **OFTEN)
    async with stream(router) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "x-leadout-request-id" in response.headers
        lines = response.aiter_lines()
        await comments(lines, 3)
        gates.before.set()
        chunk = await within(anext(line async for line in lines if line.startswith("data: ")), "a chunk")
        assert json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] == " one"
        assert await anext(lines) == ""
        await comments(lines, 2)
        gates.within.set()
        chunks = await data(lines)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" two", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    router.assert_idle()


async def test_a_chat_begins_with_its_role_after_comments(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer, gates: Gates
) -> None:
    router = await start_router(make_worker(script=gates.around([], answer([EOS]))), **OFTEN)
    gates.within.set()
    messages = [{"role": "user", "content": "Hello"}]
    async with stream(router, "chat/completions", messages=messages) as response:
        lines = response.aiter_lines()
        await comments(lines, 1)
        gates.before.set()
        first, *_ = await data(lines)
    assert first["choices"][0]["delta"]["role"] == "assistant"


async def test_text_that_is_held_back_is_silence(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer, gates: Gates
) -> None:
    """Tokens arrive all the time, but none of their text may be shown: they may begin a stop string."""
    (token,) = tokenizer.encode(" a")
    shown = asyncio.Event()

    async def script(message: Any) -> AsyncIterator[dict[str, Any]]:
        while not shown.is_set():
            yield {"token_ids": [token]}
            await asyncio.sleep(0.01)
        async for fields in answer([EOS])(message):
            yield fields

    router = await start_router(make_worker(script=script), **OFTEN)
    async with stream(router, stop=" a" * 500 + "!") as response:
        lines = response.aiter_lines()
        await comments(lines, 3)
        shown.set()
        chunks = await data(lines)
    assert set("".join(chunk["choices"][0]["text"] for chunk in chunks)) == {" ", "a"}


async def test_an_error_before_anything_was_sent_has_its_status(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    router = await start_router(make_worker(script=failing("invalid_request", "no such thing")))
    async with stream(router) as response:
        assert response.status_code == 400
        body = json.loads(await response.aread())
    assert body["error"]["message"] == "no such thing"
    router.assert_idle()


async def test_an_error_after_a_comment_is_an_event(
    start_router: StartRouter, make_worker: MakeWorker, gates: Gates
) -> None:
    script = gates.around([], failing("invalid_request", "no such thing"))
    router = await start_router(make_worker(script=script), **OFTEN)
    gates.within.set()
    async with stream(router) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await comments(lines, 2)
        gates.before.set()
        (body,) = await data(lines)
    assert (body["error"]["message"], body["error"]["code"]) == ("no such thing", "invalid_request")
    assert await router.metric('leadout_router_requests_total{endpoint="completions",status="400"}') == 1
    router.assert_idle()


async def test_comments_come_while_a_request_waits_for_a_worker(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    """Its worker is gone and no other one there: it waits, and then goes on there."""
    first, second = make_worker("d0", script=silent()), make_worker("d1", script=answer([EOS]))
    router = await start_router(first, **OFTEN)
    async with stream(router) as response:
        lines = response.aiter_lines()
        await comments(lines, 1)
        router.workers.remove(first)
        await first.stop()
        router.set_members([])
        await comments(lines, 3)
        await router.add_worker(second)
        chunks = await data(lines)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(second.generates) == 1


async def test_a_client_that_leaves_between_comments_is_cancelled_once(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=silent())
    router = await start_router(worker, **OFTEN)
    async with stream(router) as response:
        await comments(response.aiter_lines(), 2)
        await until(lambda: worker.num_running == 1, "the request on its worker")
        assert len(tasks_of_requests()) == 2  # else what follows shows nothing
    await until(lambda: worker.num_running == 0, "the cancel")
    await until(lambda: router.services.queue.line.num_admitted == 0, "the end of the request")
    await until(lambda: not tasks_of_requests(), "the end of the request's tasks")
    assert [cancel.reason for cancel in worker.cancels] == ["client"]
    router.assert_idle()
    assert await router.metric('leadout_router_requests_total{endpoint="completions",status="499"}') == 1


async def test_the_official_client_passes_over_comments(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    tokens = [*tokenizer.encode("It is Paris."), EOS]

    async def slowly(message: Any) -> AsyncIterator[dict[str, Any]]:
        async for fields in answer(tokens)(message):
            await asyncio.sleep(0.02)
            yield fields

    router = await start_router(make_worker(script=slowly), sse_keepalive_ms=2)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    assert COMMENT in (await router.post("chat/completions", body)).text  # else this shows nothing
    answered = await router.openai.chat.completions.create(**body)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in answered]
    assert "".join(pieces) == "It is Paris."


async def test_an_interval_of_zero_is_never(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    async def slowly(message: Any) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(0.05)
        async for fields in answer([*tokenizer.encode("one"), EOS])(message):
            yield fields

    router = await start_router(make_worker(script=slowly), sse_keepalive_ms=0)
    assert COMMENT not in (await router.post("completions", BODY)).text


async def test_a_whole_answer_has_none(
    start_router: StartRouter, make_worker: MakeWorker, gates: Gates
) -> None:
    router = await start_router(make_worker(script=gates.around([], answer([EOS]))), sse_keepalive_ms=1)
    gates.within.set()
    asking = asyncio.create_task(router.post("completions", {**BODY, "stream": False}))
    await asyncio.sleep(0.02)
    assert not asking.done()
    gates.before.set()
    assert (await asking).json()["choices"][0]["finish_reason"] == "stop"


def tasks_of_requests() -> set[str]:
    """What runs because of an HTTP request."""
    running = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
    return running & {"RequestResponseCycle.run_asgi", "_watch_disconnect"}
