"""Orders to change a worker's role: who gets them, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from msgspec import structs

from cluster.messages import SetRole
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.factories import load_report, worker_record
from tests.router.scripted_worker import until
from tests.router.test_cluster_view import Harness
from tests.router.test_drain_api import MakeWorker, _worker


async def _flip(router: RunningRouter, worker: str, **body: Any) -> httpx.Response:
    return await router.http.post(f"/cluster/workers/{worker}/role", json=body)


async def test_the_worker_gets_the_order(start_router: StartRouter, make_worker: MakeWorker) -> None:
    worker = _worker(make_worker, "d0")
    router = await start_router(worker, _worker(make_worker, "d1"))
    response = await _flip(router, "d0", role="prefill")
    assert (response.status_code, response.json()["role"]) == (202, "prefill")
    await until(lambda: worker.other_messages == [SetRole(role="prefill")], "the order")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"role": "prefill"}, 409, "last_worker"),
        ({"role": "both"}, 202, None),
        ({"role": "decode"}, 202, None),
        ({"role": "prefill", "force": True}, 202, None),
        ({"role": "router"}, 400, None),
        ({}, 400, None),
    ],
)
async def test_what_nobody_else_takes_is_given_up_only_by_force(
    start_router: StartRouter, make_worker: MakeWorker, fields: dict[str, Any], status: int, code: str | None
) -> None:
    router = await start_router(_worker(make_worker, "d0"), _worker(make_worker, "p0", role="prefill"))
    response = await _flip(router, "d0", **fields)
    assert response.status_code == status, response.text
    if code is not None:
        assert response.json()["error"]["code"] == code


async def test_a_worker_that_drains_is_not_flipped(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    draining = _worker(make_worker, "d0")
    draining.load = load_report(state="draining")
    router = await start_router(draining, _worker(make_worker, "d1"))
    response = await _flip(router, "d0", role="both")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "worker_draining")


async def test_two_orders_at_once_do_not_flip_both_of_two(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    """The first one's worker shows its new role only with its next record."""
    router = await start_router(_worker(make_worker, "d0"), _worker(make_worker, "d1"))
    assert (await _flip(router, "d0", role="prefill")).status_code == 202
    assert (await _flip(router, "d1", role="prefill")).status_code == 409
    assert (await _flip(router, "d0", role="decode")).status_code == 202, "taken back"
    assert (await _flip(router, "d1", role="prefill")).status_code == 202


def test_two_that_are_both_and_do_not_fit_are_named_once() -> None:
    harness = Harness()
    one, other = (
        structs.replace(
            worker_record(name, "both"), model=structs.replace(worker_record("d0").model, dtype=dtype)
        )
        for name, dtype in (("a", "float32"), ("b", "float16"))
    )
    harness.members(one, other)
    assert [item.workers for item in harness.view.incompatible] == [("a", "b")]


def slots(harness: Harness) -> tuple[list[int], list[int]]:
    """Of the workers that take requests, and of those that take prefills."""
    pool = harness.view.state.pool("test-model")
    return list(pool.decode), list(pool.prefill)


def test_a_changed_record_is_taken_over_and_pairs_follow() -> None:
    harness = Harness()
    d0, d1 = worker_record("d0", "decode"), worker_record("d1", "decode")
    harness.members(d0, d1)
    assert slots(harness) == ([0, 1], [])
    harness.members(d0, structs.replace(d1, role="both", role_epoch=1))
    assert slots(harness) == ([0, 1], [1])
    assert harness.connections.by_worker.keys() == {"d0", "d1"}
