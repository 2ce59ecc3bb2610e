"""Bodies that are not small, over HTTP: nothing of them is done in the router's own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.request.body_work import INLINE_BODY_BYTES
from tests.router import body_functions
from tests.router.conftest import MODEL, StartRouter
from tests.router.factories import load_report
from tests.router.scripted_worker import EOS, ScriptedWorker, answer, until, within

MakeWorker = Callable[..., ScriptedWorker]
pytestmark = pytest.mark.processes
LONG = "word and " * 600
BODIES = {
    "chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": LONG}]},
    "completions": {"model": MODEL, "prompt": [LONG, LONG + "more"], "max_tokens": 5},
}


@pytest.fixture
def large_model(make_worker: MakeWorker) -> ScriptedWorker:
    worker = make_worker(script=answer([EOS]), model={"max_model_len": 8192})
    worker.load = load_report(num_blocks=10_000)
    return worker


async def test_nothing_is_done_here(
    start_router: StartRouter, large_model: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router(large_model)
    for place in (
        "router.api.request.preparation.parse_body",
        "router.api.request.preparation.chat_messages",
        "router.api.request.preparation.completion_prompts",
        "router.state.prompt_hashes.hash_blocks",
        "text_pipeline.stop_strings._borders",
    ):
        monkeypatch.setattr(place, None)
    for name in ("encode", "encode_each"):
        monkeypatch.setattr(router.services.models[MODEL].text.tokenizer, name, None)
    monkeypatch.setattr(router.services.models[MODEL].text, "chat_template", None)
    for path, body in BODIES.items():
        assert len(json.dumps(body)) > INLINE_BODY_BYTES
        response = await router.post(path, {**body, "stop": ["x"]})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] > 1_000
    assert len(large_model.generates) == 3
    router.assert_idle()


async def test_a_small_body_needs_no_process(start_router: StartRouter, large_model: ScriptedWorker) -> None:
    router = await start_router(large_model)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    assert (await router.post("chat/completions", body)).status_code == 200
    assert router.services.body_workers.pids == ()


async def test_the_answer_is_the_same_wherever_the_body_was_read(
    start_router: StartRouter, large_model: ScriptedWorker
) -> None:
    router = await start_router(large_model)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "seed": 3}
    await router.post("chat/completions", body)
    await router.post("chat/completions", {**body, "metadata": {"x": "y" * INLINE_BODY_BYTES}})
    here, there = large_model.generates
    assert (here.spec.prompt_token_ids, here.spec.sampling) == (
        there.spec.prompt_token_ids,
        there.spec.sampling,
    )
    assert router.services.body_workers.pids


async def test_errors_come_back_as_they_are(start_router: StartRouter, large_model: ScriptedWorker) -> None:
    router = await start_router(large_model)
    response = await router.post("completions", {"model": MODEL, "prompt": "a" * 2_000_000})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    response = await router.post(
        "chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 10_001}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages", "invalid_value")
    assert "10000" in error["message"]
    router.assert_idle()


async def test_a_client_that_leaves_while_its_body_waits_leaves_nothing(
    start_router: StartRouter, large_model: ScriptedWorker, tmp_path: Path
) -> None:
    router = await start_router(large_model, body_processes=1)
    go = tmp_path / "go"
    busy = asyncio.create_task(router.services.body_workers.run(body_functions.wait_for_file, go, b""))
    await until(go.with_suffix(".begun").exists, "the work before it")
    waiting = router.services.metrics.bodies_waiting._value
    async with httpx.AsyncClient(base_url=router.url) as client:
        leaving = asyncio.create_task(client.post("/v1/completions", json=BODIES["completions"]))
        await until(lambda: waiting.get() == 1, "the body")
        leaving.cancel()
    await until(lambda: waiting.get() == 0, "its leaving")
    line = 'leadout_router_requests_total{endpoint="completions",status="499"}'
    while await router.metric(line) < 1:  # noqa: ASYNC110 - it comes over HTTP
        await asyncio.sleep(0.002)
    go.touch()
    await within(busy, "the work before it")
    assert large_model.generates == []
    router.assert_idle()


async def test_the_deadline_holds_while_a_body_waits(
    start_router: StartRouter, large_model: ScriptedWorker, tmp_path: Path
) -> None:
    router = await start_router(large_model, body_processes=1)
    go = tmp_path / "go"
    busy = asyncio.create_task(router.services.body_workers.run(body_functions.wait_for_file, go, b""))
    await until(go.with_suffix(".begun").exists, "the work before it")
    response = await router.post("completions", BODIES["completions"], headers={"X-Request-Timeout-Ms": "50"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    go.touch()
    await within(busy, "the work before it")
    router.assert_idle()


async def test_waiting_bodies_count_as_requests(
    start_router: StartRouter, large_model: ScriptedWorker, tmp_path: Path
) -> None:
    router = await start_router(
        large_model, body_processes=1, max_concurrent_requests=1, max_waiting_requests=1
    )
    go = tmp_path / "go"
    busy = asyncio.create_task(router.services.body_workers.run(body_functions.wait_for_file, go, b""))
    await until(go.with_suffix(".begun").exists, "the work before it")
    two: list[Any] = [
        asyncio.create_task(router.post("chat/completions", BODIES["chat/completions"])) for _ in range(2)
    ]
    await until(lambda: router.services.metrics.bodies_waiting._value.get() == 2, "both")
    assert (await router.post("chat/completions", {})).status_code == 429
    go.touch()
    await within(busy, "the work before it")
    assert [response.status_code for response in await asyncio.gather(*two)] == [200, 200]
    router.assert_idle()


async def test_what_the_processes_cannot_take_is_refused(
    start_router: StartRouter, large_model: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router(large_model, body_processes=1)
    monkeypatch.setattr(router.services.body_workers, "_max_work_s", 1e-6)
    response = await router.post("chat/completions", BODIES["chat/completions"])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "body_not_prepared")
    assert response.headers["retry-after"] == "1"
    monkeypatch.setattr(router.services.body_workers, "_max_waiting_bytes", 0)
    response = await router.post("chat/completions", BODIES["chat/completions"])
    assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_requests")
    assert "0 bytes of request bodies wait already" in response.json()["error"]["message"]
    router.assert_idle()
