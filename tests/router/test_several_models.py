"""A router that has the text side of several models, each served by workers of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.factories import load_report
from tests.router.scripted_worker import EOS, answer
from tests.router.test_chat_api import MakeWorker

MODELS = ("first", "second")
LARGE = "word " * 2_000  # goes to another process


@pytest.fixture
async def router(start_router: StartRouter, make_worker: MakeWorker) -> RunningRouter:
    workers = [
        make_worker(
            f"d-{name}",
            script=answer([number + 5, EOS]),
            model={"name": name, "max_model_len": 100 * 50**number, "fingerprint": name * 10},
        )
        for number, name in enumerate(MODELS)
    ]
    for worker in workers:
        worker.load = load_report(num_blocks=1_000)
    running: RunningRouter = await start_router(*workers, models=MODELS)
    return running


async def ask(router: RunningRouter, model: str, prompt: str = "hi") -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 4}
    return await router.post("completions", body, headers={"X-Leadout-Explain": "1"})


@pytest.mark.parametrize("model", MODELS)
async def test_each_request_goes_to_its_model_s_workers(router: RunningRouter, model: str) -> None:
    response = await ask(router, model)
    assert response.status_code == 200
    assert response.json()["model"] == model
    assert [worker.id for worker in router.workers if worker.generates] == [f"d-{model}"]
    assert f'"decode_worker":"d-{model}"' in response.headers["x-leadout-plan"]
    assert '"num_candidates":1' in response.headers["x-leadout-plan"]
    router.assert_idle()


async def test_each_model_has_its_own_limits(router: RunningRouter) -> None:
    assert (await ask(router, "second", LARGE)).status_code == 200
    refused = await ask(router, "first", LARGE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_all_models_are_listed(router: RunningRouter) -> None:
    listed = (await router.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("first", 100), ("second", 5000)]
    assert (await router.http.get("/ready")).json() == {"status": "ready", "models": ["first", "second"]}
    assert (await router.http.get("/v1/models/second")).json()["id"] == "second"


async def test_one_that_is_away_does_not_stop_the_other(router: RunningRouter) -> None:
    router.set_members(router.workers[1:])
    away = await ask(router, "first")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "no_worker_available")
    assert "no decode worker for 'first' is registered" in away.json()["error"]["message"]
    assert (await ask(router, "second")).status_code == 200
    assert (await router.http.get("/ready")).json()["models"] == ["second"]
    unknown = await ask(router, "third")
    assert unknown.status_code == 404
    assert "Models served here: 'first', 'second'." in unknown.json()["error"]["message"]
    router.set_members([])
    reasons = (await router.http.get("/ready")).json()["reasons"]
    assert reasons == [f"no decode worker for {name!r} is registered" for name in MODELS]
