"""``leadout status``: its table, its exit status, and servers that are no router."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leadout.errors import UserError
from leadout.status import run_status, state_table, wide_console
from tests.leadout.http_server import Answer, as_json, scripted_server


def _worker(
    name: str,
    role: str,
    state: str = "ready",
    *,
    queue: tuple[int, int, int] = (0, 0, 0),
    kv: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> dict[str, Any]:
    kinds = ("free", "total", "reserved", "pinned", "quarantined")
    load = {
        "queue": dict(zip(("running", "waiting", "waiting_for_remote_kv"), queue, strict=True)),
        "kv": {f"blocks_{kind}": count for kind, count in zip(kinds, kv, strict=True)},
    }
    return {"id": name, "role": role, "state": state, "pid": 100, "load": load}


def _state(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"workers": list(workers), "routers": [{"id": "router-0", "pid": 7}], **more}


def _rows(text: str) -> list[list[str]]:
    """The words of each line; ``5 / 9`` counts as three."""
    return [line.split() for line in text.splitlines() if line.strip()]


def _status_of(state: dict[str, Any], **options: Any) -> int:
    with scripted_server(lambda _request: as_json(state)) as server:
        status = run_status(server.url, **{"as_json": False, "watch_s": None, **options})
    assert [request.path for request in server.requests] == ["/cluster"]
    return status


def test_a_row_for_each_process(capsys: pytest.CaptureFixture[str]) -> None:
    busy = _worker("worker-1", "decode", queue=(1, 2, 30), kv=(4, 500, 6, 7, 8))
    wide_console().print(state_table(_state(_worker("worker-0", "prefill", "starting"), busy)))
    header, *rows = _rows(capsys.readouterr().out)
    assert " ".join(header) == (
        "process role state pid running waiting KV free / total reserved pinned quarantined"
    )
    assert [" ".join(row) for row in rows] == [
        "worker-0 prefill starting 100 0 0 0 / 0 0 0 0",
        "worker-1 decode ready 100 1 32 4 / 500 6 7 8",
        "router-0 router ready 7",
    ]


def test_nothing_is_cut_off_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "worker-" + "x" * 90
    assert _status_of(_state(_worker(name, "decode"))) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], 1),
        ([_worker("p", "prefill")], 1),
        ([_worker("d", "decode", "starting")], 1),
        ([_worker("d", "decode", "draining"), _worker("p", "prefill")], 1),
        ([_worker("d", "decode")], 0),
        ([_worker("w", "both")], 0),
        ([_worker("d", "decode", "draining"), _worker("e", "decode")], 0),
    ],
)
def test_the_exit_status_says_whether_anything_can_be_served(
    workers: list[dict[str, Any]], expected: int
) -> None:
    assert _status_of(_state(*workers)) == expected


def test_workers_that_do_not_fit_together_are_named_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    incompatible = [
        {"workers": ["worker-1", "worker-0"], "reason": "layout [block 16] against [block 32]"},
        {"workers": ["worker-2"], "reason": "another model"},
    ]
    _status_of(_state(_worker("worker-1", "decode"), _worker("worker-0", "both"), incompatible=incompatible))
    lines = capsys.readouterr().out.splitlines()
    assert "not paired: worker-1 (decode) and worker-0 (both): layout [block 16] against [block 32]" in lines
    assert "not paired: worker-2: another model" in lines


def test_json_is_the_router_s_answer(capsys: pytest.CaptureFixture[str]) -> None:
    state = _state(_worker("d", "decode", "draining"), extra=[1, None])
    assert _status_of(state, as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == state


def test_watching_asks_again_until_it_is_ended() -> None:
    answers = [as_json(_state(_worker("d", "decode")))] * 3 + [as_json({}, status=500)]
    with scripted_server(lambda _request: answers.pop(0)) as server:
        with pytest.raises(UserError, match="500"):
            run_status(server.url, as_json=False, watch_s=0.01)
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (as_json({}, status=404), "no Leadout router answers"),
        (Answer(200, ["<html>"]), "no Leadout router answers"),
        (as_json({"status": "ok"}), "is no Leadout router"),
        (as_json([1]), "is no Leadout router"),
    ],
)
def test_another_server_is_recognised(answer: Answer, message: str) -> None:
    with scripted_server(lambda _request: answer) as server:
        with pytest.raises(UserError, match=message) as caught:
            run_status(server.url, as_json=False, watch_s=None)
        assert server.url in str(caught.value)


def test_no_server_at_all() -> None:
    with scripted_server(lambda _request: as_json({})) as server:
        pass
    with pytest.raises(UserError, match="no Leadout router answers"):
        run_status(server.url, as_json=False, watch_s=None)
