"""``POST /cluster/workers/{id}/drain``: the order, who may give it, and what needs force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.messages import Drain
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.factories import load_report
from tests.router.scripted_worker import ScriptedWorker, answer, until

MakeWorker = Callable[..., ScriptedWorker]
SCRIPT = answer([5])


async def _drain(router: RunningRouter, worker: str, *, force: bool = False, **options: Any) -> Any:
    path = f"/cluster/workers/{worker}/drain"
    return await router.http.post(path, json={"force": True} if force else {}, **options)


def _worker(make_worker: MakeWorker, name: str, **fields: Any) -> ScriptedWorker:
    return make_worker(name, script=SCRIPT, **fields)


async def test_the_worker_gets_the_order(start_router: StartRouter, make_worker: MakeWorker) -> None:
    worker = _worker(make_worker, "d0")
    router = await start_router(worker, _worker(make_worker, "d1"))
    response = await _drain(router, "d0")
    assert response.status_code == 202
    assert response.json() == {"worker": "d0", "incarnation": worker.record.incarnation, "state": "draining"}
    await until(lambda: worker.other_messages == [Drain()], "the order")


async def test_an_unknown_worker_is_named_with_those_there_are(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    router = await start_router(_worker(make_worker, "d0"))
    response = await _drain(router, "d7")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "worker_not_found"
    assert error["message"] == "There is no worker 'd7'. The workers are: d0."


@pytest.mark.parametrize(
    ("role", "loss"),
    [
        ("decode", "without it every request is refused"),
        ("prefill", "without it decode workers compute all prompts themselves"),
    ],
)
async def test_the_last_of_a_role_needs_force(
    start_router: StartRouter, make_worker: MakeWorker, role: str, loss: str
) -> None:
    other = {"decode": "prefill", "prefill": "decode"}[role]
    worker = _worker(make_worker, "w", role=role)
    router = await start_router(
        worker, _worker(make_worker, "other", role=other), _worker(make_worker, "another", role=other)
    )
    response = await _drain(router, "w")
    assert response.status_code == 409
    error = response.json()["error"]
    assert error["code"] == "last_worker"
    work = {"decode": "requests", "prefill": "prefills"}[role]
    assert f"w is the last worker that takes {work} for 'test-model'" in error["message"]
    assert loss in error["message"]
    assert '{"force": true}' in error["message"]
    assert worker.other_messages == []
    assert (await _drain(router, "w", force=True)).status_code == 202
    await until(lambda: worker.other_messages == [Drain()], "the order")


async def test_workers_that_end_or_do_not_serve_yet_do_not_count(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    starting, draining = _worker(make_worker, "starting"), _worker(make_worker, "draining")
    starting.load = load_report(state="starting")
    draining.load = load_report(state="draining")
    other_model = _worker(make_worker, "other-model", model={"name": "other"})
    router = await start_router(_worker(make_worker, "d0"), starting, draining, other_model)
    assert (await _drain(router, "d0")).status_code == 409
    assert (await _drain(router, "starting")).status_code == 202  # d0 serves
    assert (await _drain(router, "draining")).status_code == 202  # again, as it ends already


async def test_two_orders_at_once_do_not_take_both_of_two(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    """The first one's worker says that it drains only with its next report."""
    router = await start_router(_worker(make_worker, "d0"), _worker(make_worker, "d1"))
    assert (await _drain(router, "d0")).status_code == 202
    assert (await _drain(router, "d1")).status_code == 409


PAGE = {"Origin": "https://evil.example.com"}


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({**PAGE, "Content-Type": "text/plain"}, b"", 403, "origin_not_allowed"),
        ({**PAGE, "Content-Type": "application/json"}, b"{}", 403, "origin_not_allowed"),
        ({"Origin": "null", "Content-Type": "application/json"}, b"{}", 403, "origin_not_allowed"),
        (
            {"Sec-Fetch-Site": "same-site", "Content-Type": "application/json"},
            b"{}",
            403,
            "origin_not_allowed",
        ),
        ({"Host": "evil.example.com", "Content-Type": "application/json"}, b"{}", 403, "host_not_allowed"),
        ({"Content-Type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"{}", 415, "unsupported_media_type"),
        ({}, b"", 415, "unsupported_media_type"),
        ({"Content-Type": "application/json"}, b"", 400, "invalid_json"),
        ({"Content-Type": "application/json"}, b"[]", 400, "invalid_json"),
        ({"Content-Type": "application/json"}, b'{"force": "yes"}', 400, "invalid_type"),
        ({"Content-Type": "application/json"}, b'{"forced": true}', 400, "invalid_type"),
    ],
)
async def test_what_a_page_can_send_and_what_is_no_order(
    start_router: StartRouter,
    make_worker: MakeWorker,
    headers: dict[str, str],
    content: bytes,
    status: int,
    code: str,
) -> None:
    worker = _worker(make_worker, "d0")
    router = await start_router(
        worker, _worker(make_worker, "d1"), app={"cors_origins": ["https://evil.example.com"]}
    )
    response = await router.http.post("/cluster/workers/d0/drain", headers=headers, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert not router.services.view.state.get("d0").is_draining  # type: ignore[union-attr]
    assert worker.other_messages == []


async def test_the_router_s_own_page_and_a_name_that_was_allowed(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    router = await start_router(
        _worker(make_worker, "d0"), _worker(make_worker, "d1"), app={"allowed_hosts": ["leadout.example.com"]}
    )
    headers = {
        "Host": "leadout.example.com:8000",
        "Origin": "https://leadout.example.com:8000",
        "Sec-Fetch-Site": "same-origin",
    }
    response = await _drain(router, "d0", headers=headers)
    assert response.status_code == 202
