"""``leadout flip``: the order, what is shown meanwhile, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leadout import worker_orders
from leadout.errors import UserError
from leadout.flip import run_flip
from tests.leadout.http_server import Answer, Request, as_json, scripted_server


def _worker(role: str, *, role_epoch: int, reported: int, num_leaving: int = 0) -> dict[str, Any]:
    load = {"role_epoch": reported, "num_leaving": num_leaving}
    return {"id": "w", "incarnation": 5, "role": role, "role_epoch": role_epoch, "load": load}


def _router(states: list[list[dict[str, Any]]]) -> Callable[[Request], Answer]:
    """Takes the order, then lists the workers of each state once, and those of the last one for ever."""

    def respond(request: Request) -> Answer:
        if request.method == "POST":
            return as_json({"worker": "w", "incarnation": 5, "role": "prefill"}, 202)
        workers = states.pop(0) if len(states) > 1 else states[0]
        return as_json({"workers": workers, "routers": []})

    return respond


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_orders, "_POLL_S", 0.01)


def test_it_is_followed_until_nothing_of_the_old_role_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """A report from before the flip, which counts nothing, does not end it."""
    states = [
        [_worker("decode", role_epoch=0, reported=0)],
        [_worker("prefill", role_epoch=1, reported=0)],
        [_worker("prefill", role_epoch=1, reported=1, num_leaving=2)],
        [_worker("prefill", role_epoch=1, reported=1)],
    ]
    with scripted_server(_router(states)) as server:
        assert run_flip(server.url, "w", "prefill", wait_s=30) == 0
    assert server.requests[0].path == "/cluster/workers/w/role"
    assert server.requests[0].body == {"role": "prefill", "force": False}
    assert capsys.readouterr().out.splitlines() == [
        "w is decode, 0 in hand of what it takes no more",
        "w is prefill, 0 in hand of what it takes no more",
        "w is prefill, 2 in hand of what it takes no more",
        "w is prefill",
    ]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([], "w has left"),
        ([_worker("decode", role_epoch=0, reported=0)], "w has not finished after 0.05 s; it goes on"),
    ],
    ids=["gone", "late"],
)
def test_one_that_does_not_get_there(
    capsys: pytest.CaptureFixture[str], after: list[dict[str, Any]], said: str
) -> None:
    with scripted_server(_router([after])) as server:
        assert run_flip(server.url, "w", "prefill", wait_s=0.05) == 1
    assert said in capsys.readouterr().out


def test_what_the_router_refuses_is_said() -> None:
    refusal = as_json({"error": {"message": "w drains, and will end."}}, 409)
    with (
        scripted_server(lambda _request: refusal) as server,
        pytest.raises(UserError, match="w drains, and will end"),
    ):
        run_flip(server.url, "w", "prefill", wait_s=30)
