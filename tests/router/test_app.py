"""What load balancers and web pages do: HEAD, OPTIONS, CORS, the small routes, and the API's description."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import ScriptedWorker, answer, endless, until
from text_pipeline.tokenizer import Tokenizer

PAGE = "https://chat.example.com"
GETS = [
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/cluster",
    "/v1/models",
    "/openapi.json",
]


@pytest.mark.parametrize("path", GETS)
async def test_head_is_get_without_the_body(start_router: StartRouter, path: str) -> None:
    router = await start_router()
    got, head = await router.http.get(path), await router.http.head(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    if path != "/metrics":  # whose numbers have gone on
        assert head.headers["content-length"] == got.headers["content-length"]
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["x-request-id"]


async def test_head_of_what_can_only_be_posted(start_router: StartRouter) -> None:
    router = await start_router()
    response = await router.http.head("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "OPTIONS, POST"


async def test_a_wrong_method_names_the_right_ones(start_router: StartRouter) -> None:
    router = await start_router()
    response = await router.http.delete("/ping")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert response.json()["error"]["message"] == (
        "The method DELETE is not allowed for /ping. Allowed: GET, HEAD, OPTIONS, POST."
    )


async def test_options_without_cors(start_router: StartRouter) -> None:
    router = await start_router()
    response = await router.http.options("/v1/models", headers=_preflight("GET"))
    assert (response.status_code, response.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert "access-control-allow-origin" not in response.headers
    assert (await router.http.options("/nothing")).status_code == 404


async def test_the_small_routes(
    start_router: StartRouter, make_worker: Callable[..., ScriptedWorker]
) -> None:
    router = await start_router(make_worker("d0", script=endless(500)))  # a token with a text
    version = importlib.metadata.version("leadout")
    assert (await router.http.get("/version")).json() == {"version": version}
    assert (await router.http.get("/ping")).status_code == 200
    assert (await router.http.post("/ping")).status_code == 200
    assert (await router.http.get("/load")).json() == {"server_load": 0}
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 200, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert (await router.http.get("/load")).json() == {"server_load": 1}
    await until(lambda: router.services.queue.num_requests == 0, "the end of the request")


def _preflight(
    method: str, headers: str = "authorization,content-type,x-request-timeout-ms"
) -> dict[str, str]:
    return {
        "Origin": PAGE,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }


async def _with_cors(start_router: StartRouter, *workers: ScriptedWorker, **options: Any) -> RunningRouter:
    router: RunningRouter = await start_router(*workers, app={"cors_origins": [PAGE]}, **options)
    return router


async def test_a_preflight_of_an_allowed_page(start_router: StartRouter) -> None:
    router = await _with_cors(start_router)
    headers = "authorization,content-type,x-request-id,x-request-timeout-ms,x-leadout-explain,x-stainless-os"
    response = await router.http.options("/v1/chat/completions", headers=_preflight("POST", headers))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(headers.split(",")) <= set(allowed)


async def test_a_preflight_of_another_page(start_router: StartRouter) -> None:
    router = await _with_cors(start_router)
    headers = {**_preflight("POST"), "Origin": "https://evil.example.com"}
    response = await router.http.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers


async def test_a_page_reads_answers_and_errors(
    start_router: StartRouter, make_worker: Callable[..., ScriptedWorker]
) -> None:
    worker = make_worker("d0", script=answer([5, 6], finish_reason="length"))
    router = await _with_cors(start_router, worker, max_concurrent_requests=1, max_waiting_requests=0)
    good = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "stream": True}

    async def post(body: dict[str, Any]) -> httpx.Response:
        response: httpx.Response = await router.post("completions", body, headers={"Origin": PAGE})
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
        assert response.headers["x-request-id"]
        return response

    response = await post(good)
    assert response.status_code == 200
    assert response.text.endswith("data: [DONE]\n\n")
    assert (await post({})).status_code == 400
    router.services.queue.num_requests = 1
    assert (await post(good)).status_code == 429


async def test_a_page_that_leaves_is_noticed(
    start_router: StartRouter, make_worker: Callable[..., ScriptedWorker], tokenizer: Tokenizer
) -> None:
    (token,) = tokenizer.encode(" the")
    worker = make_worker("d0", script=endless(token))
    router = await _with_cors(start_router, worker)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 200, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body, headers={"Origin": PAGE}) as response:
        await anext(response.aiter_lines())
    await until(lambda: len(worker.cancels) == 1, "the cancel")


async def test_the_page_for_people_loads_nothing_from_elsewhere(start_router: StartRouter) -> None:
    router = await start_router()
    page = await router.http.get("/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    assert "http://" not in page.text
    parts = [part.split('"')[0] for part in page.text.replace('href="', 'src="').split('src="')[1:]]
    assert any(part.endswith(".js") for part in parts)
    for part in parts:
        assert (await router.http.get(part)).status_code == 200, part


async def test_the_description_is_of_what_there_is(start_router: StartRouter) -> None:
    router = await start_router()
    description = (await router.http.get("/openapi.json")).json()
    assert description["info"]["version"] == importlib.metadata.version("leadout")
    assert "$ref" not in json.dumps(description["paths"])
    completions = description["paths"]["/v1/completions"]["post"]
    schema = completions["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "prompt"} <= set(schema["required"])
    assert "temperature" in schema["properties"]
    assert set(completions["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    for path, operations in description["paths"].items():
        for operation in operations.values():
            # Errors have OpenAI's shape; FastAPI's own 422 never comes.
            assert {"4XX", "5XX"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"], path
    drain = description["paths"]["/cluster/workers/{worker}/drain"]["post"]
    assert (
        drain["requestBody"]["content"]["application/json"]["schema"]["properties"]["force"]["type"]
        == "boolean"
    )
