"""``POST /cluster/workers/{id}/drain``."""

from __future__ import annotations

from collections.abc import Callable

from cluster.messages import Drain
from tests.router.conftest import StartRouter
from tests.router.scripted_worker import ScriptedWorker, answer, until


async def test_the_worker_gets_the_order(
    start_router: StartRouter, make_worker: Callable[..., ScriptedWorker]
) -> None:
    worker = make_worker("d0", script=answer([5]))
    router = await start_router(worker)
    response = await router.http.post("/cluster/workers/d0/drain")
    assert response.status_code == 202
    assert response.json() == {"worker": "d0", "incarnation": worker.record.incarnation, "state": "draining"}
    await until(lambda: worker.other_messages == [Drain()], "the order")


async def test_an_unknown_worker_is_named_with_those_there_are(
    start_router: StartRouter, make_worker: Callable[..., ScriptedWorker]
) -> None:
    router = await start_router(make_worker("d0", script=answer([5])))
    response = await router.http.post("/cluster/workers/d7/drain")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "worker_not_found"
    assert error["message"] == "There is no worker 'd7'. The workers are: d0."
