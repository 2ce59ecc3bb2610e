"""``leadout drain``: the order, what is shown meanwhile, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leadout import worker_orders
from leadout.drain import run_drain
from leadout.errors import UserError
from tests.leadout.http_server import Answer, Request, as_json, scripted_server


def _worker(incarnation: int = 5, running: int = 2) -> dict[str, Any]:
    load = {
        "queue": {"running": running, "waiting": 1, "waiting_for_remote_kv": 3},
        "handoffs": {"streaming": 2, "active": 1},
    }
    return {"id": "worker-1", "incarnation": incarnation, "role": "decode", "state": "draining", "load": load}


def _router(states: list[list[dict[str, Any]]]) -> Callable[[Request], Answer]:
    """Takes the order, then lists the workers of each state once, and those of the last one for ever."""

    def respond(request: Request) -> Answer:
        if request.method == "POST":
            return as_json({"worker": "worker-1", "incarnation": 5, "state": "draining"}, 202)
        workers = states.pop(0) if len(states) > 1 else states[0]
        return as_json({"workers": workers, "routers": []})

    return respond


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_orders, "_POLL_S", 0.01)


@pytest.mark.parametrize("after", [[], [_worker(incarnation=6)]], ids=["gone", "replaced"])
def test_it_is_followed_until_it_has_left(
    capsys: pytest.CaptureFixture[str], after: list[dict[str, Any]]
) -> None:
    with scripted_server(_router([[_worker()], [_worker()], [_worker(running=0)], after])) as server:
        assert run_drain(server.url, "worker-1", wait_s=30) == 0
    assert server.requests[0].path == "/cluster/workers/worker-1/drain"
    assert server.requests[0].headers["content-type"] == "application/json"
    assert server.requests[0].body == {"force": False}
    assert capsys.readouterr().out.splitlines() == [
        "worker-1 (decode) is draining: 2 running, 4 waiting, 3 handoffs",
        "worker-1 (decode) is draining: 0 running, 4 waiting, 3 handoffs",
        "worker-1 has left",
    ]


def test_one_that_does_not_leave_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(_router([[_worker()]])) as server:
        assert run_drain(server.url, "worker-1", wait_s=0.05) == 1
    assert "has not left after 0.05 s; it goes on draining" in capsys.readouterr().out


def test_without_waiting_only_the_order_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(_router([[_worker()]])) as server:
        assert run_drain(server.url, "worker-1", wait_s=0) == 0
    assert len(server.requests) == 1
    assert capsys.readouterr().out == "worker-1 drains\n"


def test_force_is_passed_on() -> None:
    with scripted_server(_router([[_worker()]])) as server:
        assert run_drain(server.url, "worker-1", wait_s=0, force=True) == 0
    assert server.requests[0].body == {"force": True}


def test_what_the_router_refuses_is_said() -> None:
    refusal = as_json({"error": {"message": "There is no worker 'x'. The workers are: worker-1."}}, 404)
    with (
        scripted_server(lambda _request: refusal) as server,
        pytest.raises(UserError, match=r"no worker 'x'\. The workers are: worker-1"),
    ):
        run_drain(server.url, "x", wait_s=1)


def test_what_is_no_router_is_said() -> None:
    with (
        scripted_server(lambda _request: as_json(["hello"], 202)) as server,
        pytest.raises(UserError, match="no Leadout router answers"),
    ):
        run_drain(server.url, "worker-1", wait_s=1)
    with pytest.raises(UserError, match="no Leadout router answers"):
        run_drain("http://127.0.0.1:1", "worker-1", wait_s=1)
