"""All checks together: order, printing, JSON, exit status."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from cluster.config.settings import LeadoutConfig, RegistryConfig, RouterConfig
from leadout.doctor.check import CheckResult, Status
from leadout.doctor.run import checks, exit_status, print_result, run_doctor
from tests.leadout.http_server import as_json, scripted_server


def _result(status: Status, remedy: str = "") -> CheckResult:
    return CheckResult("transfer:path", status, "seen [this] thing", remedy, {})


@pytest.mark.processes
@pytest.mark.slow
def test_json_is_all_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    config = LeadoutConfig(router=RouterConfig(port=0))
    status = run_doctor(config, as_json=True, strict=False, url=None)
    printed = json.loads(capfd.readouterr().out)
    names = [check["name"] for check in printed["checks"]]
    assert printed["ok"] == (status == 0)
    assert printed["ok"] == all(check["status"] != "failed" for check in printed["checks"])
    assert len(names) == len(set(names)), "scripts look checks up by name"
    assert {"python", "torch", "model", "nixl", "nixl:agent", "transfer:path", "registry"} <= set(names)
    for check in printed["checks"]:
        assert set(check) == {"name", "status", "seen", "remedy", "data"}
        assert check["status"] in ("ok", "warning", "failed", "skipped")
        assert bool(check["remedy"]) == (check["status"] in ("warning", "failed")), check


def test_a_cluster_is_looked_at_only_with_its_address() -> None:
    with scripted_server(lambda _request: as_json({"workers": [], "routers": []})) as server:
        *_, last = checks(LeadoutConfig(), server.url)
        assert last.name == "cluster"
        last.look()
        assert [request.path for request in server.requests] == ["/cluster"]
    assert "cluster" not in [check.name for check in checks(LeadoutConfig(), None)]


def test_every_check_has_a_name_of_its_own_and_a_bound() -> None:
    all_checks = checks(LeadoutConfig(registry=RegistryConfig(url="redis://registry")), "http://router")
    assert len({check.name for check in all_checks}) == len(all_checks)
    assert all(0 < check.timeout_s <= 130 for check in all_checks)


@pytest.mark.parametrize(
    ("statuses", "strict", "expected"),
    [
        ([], False, 0),
        (["ok", "skipped"], True, 0),
        (["ok", "warning"], False, 0),
        (["ok", "warning"], True, 1),
        (["failed", "ok"], False, 1),
        (["failed"], True, 1),
    ],
)
def test_the_exit_status(statuses: list[Status], strict: bool, expected: int) -> None:
    assert exit_status([_result(status) for status in statuses], strict=strict) == expected


def test_a_line_for_each_check_and_one_for_its_remedy() -> None:
    out = io.StringIO()
    console = Console(file=out, highlight=False, width=20)  # a file: nothing is wrapped
    print_result(console, _result("warning", "mend [it]"))
    print_result(console, _result("ok"))
    assert out.getvalue().splitlines() == [
        "warning  transfer:path       seen [this] thing",
        "         → mend [it]",
        "ok       transfer:path       seen [this] thing",
    ]


def test_a_terminal_gets_wrapped_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, highlight=False, width=40, force_terminal=True, color_system=None)
    print_result(console, _result("failed", "mend it with a very long command line"))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "failed   transfer:path       seen [this]",
        "                             thing",
        "         → mend it with a very long",
        "         command line",
    ]
