"""What clients are told while a router's view of the cluster is too old, or a worker unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import EOS, ScriptedWorker, answer, endless, until
from text_pipeline.tokenizer import Tokenizer

MakeWorker = Callable[..., ScriptedWorker]
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
PROBLEM = "the registry has not answered for 601 s"


async def shown_state(router: RunningRouter, worker: str) -> str:
    """Its state in ``/cluster``."""
    workers = (await router.http.get("/cluster")).json()["workers"]
    (state,) = [one["state"] for one in workers if one["id"] == worker]
    return str(state)


async def collect_text(router: RunningRouter, body: dict[str, Any]) -> str:
    """The whole text of a stream."""
    stream = await router.openai.completions.create(**body, stream=True)
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


async def test_a_view_that_is_too_old_refuses_new_requests(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    assert (await router.http.get("/ready")).status_code == 200
    router.services.registry_problem = lambda: PROBLEM
    response = await router.post("completions", BODY)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["message"] == f"The view of the cluster is too old: {PROBLEM}."
    assert worker.generates == []
    ready = await router.http.get("/ready")
    assert ready.status_code == 503
    assert PROBLEM in ready.text
    router.assert_idle()


async def test_when_the_registry_is_back_requests_are_served(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    router = await start_router(make_worker(script=answer([EOS])))
    router.services.registry_problem = lambda: PROBLEM
    assert (await router.post("completions", BODY)).status_code == 503
    router.services.registry_problem = lambda: ""
    assert (await router.post("completions", BODY)).status_code == 200
    assert (await router.http.get("/ready")).status_code == 200


async def test_what_runs_goes_on_without_the_registry(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    (token,) = tokenizer.encode(" the")
    router = await start_router(make_worker(script=endless(token)))
    body = {**BODY, "max_tokens": 100, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        assert " the" in await anext(lines)
        router.services.registry_problem = lambda: PROBLEM
        for _ in range(10):
            assert " the" in await anext(line async for line in lines if line)
    await until(lambda: len(router.services.dispatcher.in_flight) == 0, "the end of the request")


async def test_members_that_were_never_known_are_named(start_router: StartRouter) -> None:
    router = await start_router()
    router.services.registry_problem = lambda: "registry redis://nowhere: refused"
    response = await router.post("completions", BODY)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert message == f"No decode worker for the model {MODEL!r} is ready: registry redis://nowhere: refused."


async def test_a_worker_whose_connection_broke_is_shown_as_unreachable(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker, other = make_worker("d0", script=answer([EOS])), make_worker("d1", script=answer([EOS]))
    router = await start_router(worker, other)
    assert await shown_state(router, "d0") == "ready"
    await worker.stop()
    view = router.services.view.state.get("d0")
    assert view is not None
    await until(lambda: not view.is_reachable, "the loss of the connection")
    assert await shown_state(router, "d0") == "unreachable"
    assert await shown_state(router, "d1") == "ready"
    for _ in range(3):
        assert (await router.post("completions", BODY)).status_code == 200
    assert len(other.generates) == 3
    await other.stop()
    await until(lambda: not router.services.view.state.models(ready=True), "the loss of the other one")
    response = await router.post("completions", BODY)
    assert response.status_code == 503
    assert "decode worker d0 is unreachable; decode worker d1 is unreachable" in response.text
    ready = await router.http.get("/ready")
    assert ready.status_code == 503
    assert "decode worker d0 is unreachable" in ready.text


async def test_a_stream_goes_on_when_the_connection_to_its_worker_breaks(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    """Over real sockets: the client gets every token once."""
    one, two, three = (tokenizer.encode(word)[0] for word in (" one", " two", " three"))
    first = make_worker("d0", script=endless(one, first=3))
    second = make_worker("d1", script=answer([two, three], finish_reason="length"))
    router = await start_router(first, second)
    streaming = asyncio.create_task(collect_text(router, {**BODY, "max_tokens": 5}))
    in_flight = router.services.dispatcher.in_flight
    await until(lambda: any(len(entry.output_token_ids) == 3 for entry in in_flight), "three tokens")
    await first.stop()
    assert await streaming == " one one one two three"
    assert [generate.spec.output_token_ids for generate in second.generates] == [[one, one, one]]
    line = 'leadout_router_redispatches_total{kind="migration",reason="worker_lost"}'
    assert await router.metric(line) == 1
    router.assert_idle()
