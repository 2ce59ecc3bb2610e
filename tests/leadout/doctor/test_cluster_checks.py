"""A running cluster as ``/cluster`` shows it."""

from __future__ import annotations

from typing import Any

import pytest

from leadout.doctor.check import Finding, Status
from leadout.doctor.cluster_checks import check_cluster, judge_link
from tests.leadout.http_server import as_json, scripted_server


def _worker(
    name: str, role: str, state: str = "ready", num_quarantined: int = 0, **load: Any
) -> dict[str, Any]:
    return {
        "id": name,
        "role": role,
        "state": state,
        "load": {"kv": {"blocks_quarantined": num_quarantined}, **load},
    }


def _check(*answers: dict[str, Any], stuck_after_s: float = 0.05) -> dict[str, Finding]:
    """The last answer is given again and again."""
    left = list(answers)
    with scripted_server(lambda _request: as_json(left.pop(0) if len(left) > 1 else left[0])) as server:
        found = check_cluster(server.url, stuck_after_s=stuck_after_s)
    return {finding.about: finding for finding in found}


def _state(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"workers": list(workers), "routers": [], **more}


_PREFILL, _DECODE = _worker("p", "prefill"), _worker("d", "decode")


def test_a_cluster_that_is_well() -> None:
    links = [{"peer": "d", "probe_gbps": 4.1, "gbps": 3.9}]
    found = _check(_state(_worker("p", "prefill", links=links), _DECODE, incompatible=[]))
    assert {about: finding.status for about, finding in found.items()} == {
        "workers": "ok",
        "pairs": "ok",
        "link:p->d": "ok",
        "quarantine": "ok",
    }
    assert found["link:p->d"].data == {"worker": "p", "peer": "d", "probe_gbps": 4.1, "gbps": 3.9}


def test_a_worker_that_is_both_can_generate() -> None:
    finding = _check(_state(_worker("w", "both"), _PREFILL))["workers"]
    assert (finding.status, finding.seen) == ("ok", "2 prefill and 1 decode workers, 1 both, all ready")


def test_routers_that_know_no_links() -> None:
    assert _check(_state(_PREFILL, _DECODE))["links"].status == "skipped"


@pytest.mark.parametrize(
    ("probe", "gbps", "status"),
    [
        (4.0, 4.0, "ok"),
        (4.0, 1.0, "ok"),
        (4.0, 0.99, "warning"),
        (0.0, 0.0, "skipped"),
        (4.0, 0.0, "skipped"),
    ],
)
def test_a_link_that_has_become_slow(probe: float, gbps: float, status: Status) -> None:
    finding = judge_link("p", "d", probe, gbps)
    assert finding.status == status
    assert ("transfer:path" in finding.remedy) == (status == "warning")


def test_workers_that_are_not_ready() -> None:
    finding = _check(_state(_worker("p", "prefill", "unreachable"), _DECODE))["workers"]
    assert finding.status == "warning"
    assert "p (prefill) is unreachable" in finding.seen
    assert _check(_state(_PREFILL, _worker("d", "decode", "starting")))["workers"].status == "failed"
    assert _check(_state())["workers"].status == "failed"


def test_workers_that_do_not_fit_together() -> None:
    item = {"workers": ["p", "d"], "reason": "dtype differs: p has float32, d has bfloat16"}
    finding = _check(_state(_PREFILL, _DECODE, incompatible=[item]))["pairs"]
    assert finding.status == "warning"
    assert "p (prefill) and d (decode): dtype differs: p has float32, d has bfloat16" in finding.seen


def test_blocks_that_stay_in_quarantine_and_blocks_that_come_back() -> None:
    def quarantined(one: int, other: int) -> dict[str, Any]:
        return _state(
            _worker("d", "decode", num_quarantined=one),
            _worker("e", "decode", num_quarantined=other),
        )

    finding = _check(quarantined(7, 2), quarantined(5, 0))["quarantine"]
    assert finding.status == "warning"
    assert finding.data["stuck_blocks"] == {"d": 5}
    assert _check(quarantined(7, 2), quarantined(0, 0))["quarantine"].status == "ok"


def test_something_else_at_the_address() -> None:
    (finding,) = _check({"status": "ok"}).values()
    assert finding.status == "failed"
    assert "--url" in finding.remedy
