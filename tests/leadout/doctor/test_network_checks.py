"""The router's port and the workers' address, on real sockets."""

from __future__ import annotations

import socket

import pytest

from cluster.config.settings import RouterConfig, WorkerConfig
from leadout.doctor import network_checks
from leadout.doctor.check import Status
from leadout.doctor.network_checks import check_router_port, check_worker_address, judge_worker_address
from tests.leadout.http_server import as_json, scripted_server

_LOCAL = "redis://127.0.0.1:6379/0"
_REMOTE = "redis://registry.example:6379/0"


def test_a_port_in_use_and_then_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "_HTTP_TIMEOUT_S", 0.1)  # who listens never answers
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        finding = check_router_port(RouterConfig(port=port))
        assert finding.status == "failed"
        assert f"127.0.0.1:{port}" in finding.seen
        assert f"sport = :{port}" in finding.remedy
    assert check_router_port(RouterConfig(port=port)).status == "ok"
    assert check_router_port(RouterConfig(port=0)).status == "ok"


def test_a_router_that_runs_already_is_told_from_another_program() -> None:
    for answer, status in (({"workers": [], "routers": []}, "warning"), ({"workers": []}, "failed")):
        with scripted_server(lambda _request, answer=answer: as_json(answer)) as server:  # type: ignore[misc]
            port = int(server.url.rpartition(":")[2])
            assert check_router_port(RouterConfig(port=port)).status == status


def test_a_host_that_is_nobody() -> None:
    finding = check_router_port(RouterConfig(host="no-such-host.invalid"))
    assert finding.status == "failed"
    assert "'no-such-host.invalid'" in finding.seen
    assert "router.host" in finding.remedy


def test_an_address_that_a_worker_cannot_bind() -> None:
    finding = check_worker_address(WorkerConfig(host="192.0.2.1"), _LOCAL)  # for documentation, nobody's
    assert finding.status == "failed"
    assert "tcp://192.0.2.1:*" in finding.seen


def test_a_worker_s_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        finding = check_worker_address(WorkerConfig(port=other.getsockname()[1]), _LOCAL)
    assert finding.status == "failed"
    assert "worker.port" in finding.remedy


def test_the_default_address_is_fine_on_one_machine_only() -> None:
    assert check_worker_address(WorkerConfig(), _LOCAL).status == "ok"
    assert check_worker_address(WorkerConfig(), "unix:///run/registry.sock").status == "ok"
    finding = check_worker_address(WorkerConfig(), _REMOTE)
    assert finding.status == "warning"
    assert "worker.host" in finding.remedy


@pytest.mark.parametrize(
    ("address", "registry", "status"),
    [
        ("10.0.0.7", _REMOTE, "ok"),
        ("0.0.0.0", _REMOTE, "warning"),
        ("::", _REMOTE, "warning"),
        ("::1", _REMOTE, "warning"),
        ("0.0.0.0", _LOCAL, "ok"),
        ("127.0.0.1", "redis://localhost:6379", "ok"),
        ("127.0.0.1", "rediss://[::1]:6379", "ok"),
    ],
)
def test_who_can_reach_a_worker(address: str, registry: str, status: Status) -> None:
    assert judge_worker_address(address, address, registry).status == status
