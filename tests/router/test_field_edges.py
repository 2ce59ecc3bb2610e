"""Numbers at the edge, in every field: an answer, or a 400 that names the field; no worker is to blame."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import SequenceSpec
from router.api.request.schemas import ChatCompletionRequest, CompletionRequest, StreamOptions
from router.dispatch.in_flight import SequenceRequest
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.request_values import EDGES, NUMBERS, mixed_bodies
from tests.router.scripted_worker import EOS, answer, failing, within
from tests.router.test_chat_api import QUESTION, MakeWorker

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": MODEL, "messages": QUESTION, "max_completion_tokens": 4},
    "completions": {"model": MODEL, "prompt": "a b", "max_tokens": 4},
}
CHAT_FIELDS = [name for name in ChatCompletionRequest.model_fields if name != "messages"]
COMPLETION_FIELDS = list(CompletionRequest.model_fields)


@pytest.fixture
async def router(start_router: StartRouter, make_worker: MakeWorker) -> RunningRouter:
    running: RunningRouter = await start_router(make_worker(script=answer([EOS])), max_n=4)
    return running


async def send(router: RunningRouter, path: str, body: dict[str, Any]) -> httpx.Response:
    # msgspec writes whole numbers of any size, as other clients do.
    return await router.http.post(f"/v1/{path}", content=msgspec.json.encode(body))


def check(response: httpx.Response, what: str) -> dict[str, Any] | None:
    """The error, if it is one; anything but an answer and a client's error fails."""
    assert response.status_code in (200, 400, 404), f"{what}: {response.status_code} {response.text[:300]}"
    if response.status_code == 200:
        return None
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert len(response.content) < 2000
    return error


def assert_blameless(router: RunningRouter) -> None:
    """No attempt failed, and every message could be read."""
    router.assert_idle()
    (worker,) = router.workers
    assert all(message.key.attempt == 0 for message in worker.generates)
    assert worker.num_malformed == 0


@pytest.mark.parametrize(
    ("path", "fields"), [("chat/completions", CHAT_FIELDS), ("completions", COMPLETION_FIELDS)]
)
async def test_every_field_at_every_edge(router: RunningRouter, path: str, fields: list[str]) -> None:
    for field in fields:
        for value in EDGES:
            what = f"{field} = {str(value)[:40]}"
            error = check(await send(router, path, {**BODIES[path], field: value}), what)
            if error is not None and error["code"] == "context_length_exceeded":
                assert field in ("max_tokens", "max_completion_tokens")
            elif error is not None:
                assert error["param"].split("[")[0].split(".")[0] == field, (what, error)
            if value is None and field not in ("model", "prompt"):
                assert error is None, what
    assert_blameless(router)


async def test_edges_inside_of_fields(router: RunningRouter) -> None:
    for value in EDGES:
        for path, body in bodies_with(value):
            error = check(await send(router, path, body), str(body)[:200])
            assert error is None or error["param"] is not None
    assert_blameless(router)


def bodies_with(value: Any) -> list[tuple[str, dict[str, Any]]]:
    completion, chat = BODIES["completions"], BODIES["chat/completions"]
    function = {"name": "f", "arguments": msgspec.json.encode(value).decode()}
    call = {"id": "c", "type": "function", "function": function}
    completions: list[dict[str, Any]] = [
        {"logit_bias": {"5": value}},
        {"logit_bias": {str(value): 1}},
        {"stop_token_ids": [value]},
        {"prompt": [value]},
        {"prompt": [[1, value]]},
        {"stop": [value]},
        *({"stream": True, "stream_options": {name: value}} for name in StreamOptions.model_fields),
    ]
    chats: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"x": value}},
        {"metadata": {"x": value}},
        {"messages": [value]},
        {"messages": [{"role": "user", "content": value}]},
        {"messages": [{"role": value, "content": "q"}]},
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": value}]},
        {"tools": [value], "tool_choice": "none"},
    ]
    return [
        *(("completions", {**completion, **fields}) for fields in completions),
        *(("chat/completions", {**chat, **fields}) for fields in chats),
    ]


async def test_fields_of_any_name_are_ignored(router: RunningRouter) -> None:
    names = (
        "",
        "a.b",
        "self",
        "_fields_set",
        "model_extra",
        "model_config",
        "__class__",
        "__dict__",
        "Ω" * 999,
    )
    for path, body in BODIES.items():
        for value in (True, 2**64, 0.5, "x", {"x": 1}):
            fields = dict.fromkeys(names, value)
            assert check(await send(router, path, {**fields, **body}), path) is None
    assert_blameless(router)


async def test_the_timeout_in_the_header(router: RunningRouter) -> None:
    for value in (*map(str, NUMBERS), "", "true", "null", "1_0", "+1", "0x10", "9" * 500):
        headers = {"X-Request-Timeout-Ms": value}
        response = await router.post("completions", BODIES["completions"], headers=headers)
        if value in ("1", "2"):  # so short a time may pass
            assert response.status_code in (200, 504)
            continue
        error = check(response, value)
        assert error is None or error["param"] == "X-Request-Timeout-Ms"
        assert (error is None) == (value == str(2**31))


async def test_a_number_that_no_float_holds_is_no_number(router: RunningRouter) -> None:
    text = json.dumps(BODIES["completions"])[:-1] + ', "temperature": 1e999}'
    response = await router.http.post("/v1/completions", content=text)
    assert response.status_code == 400
    assert "out of range" in response.json()["error"]["message"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=mixed_bodies(COMPLETION_FIELDS))
async def test_combinations_of_values(router: RunningRouter, body: dict[str, Any]) -> None:
    check(await send(router, "completions", {**BODIES["completions"], **body}), str(body)[:300])
    assert_blameless(router)


async def test_a_request_that_no_message_can_carry_ends_and_blames_nobody(router: RunningRouter) -> None:
    """What the API lets through always fits; should it not, the worker is not at fault."""
    queue = router.services.queue
    request = SequenceRequest(
        request_id="r",
        spec=SequenceSpec(
            prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=4, seed=1, top_k=10**27)
        ),
        model=MODEL,
    )
    generation = queue.start([request], timeout_ms=60_000)
    ((index, output),) = await within(generation.next(), "the error")
    assert index == 0
    assert output.error is not None
    assert output.error.code == "undecodable_message"
    assert not output.error.retryable
    queue.close(generation, "done")
    assert_blameless(router)
    assert router.workers[0].generates == []
    assert check(await send(router, "completions", BODIES["completions"]), "afterwards") is None


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [("undecodable_message", 500, "server_error"), ("invalid_request", 400, "invalid_request_error")],
)
async def test_what_one_worker_cannot_take_no_other_is_asked(
    start_router: StartRouter, make_worker: MakeWorker, code: str, status: int, error_type: str
) -> None:
    script = failing(code, "min_p is 7, must be from 0 to 1")
    router = await start_router(make_worker("d0", script=script), make_worker("d1", script=script))
    response = await send(router, "completions", BODIES["completions"])
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "min_p is 7, must be from 0 to 1",
        "type": error_type,
        "param": None,
        "code": code,
    }
    assert sum(len(worker.generates) for worker in router.workers) == 1
    router.assert_idle()
