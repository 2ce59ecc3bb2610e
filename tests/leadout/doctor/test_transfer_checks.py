"""NIXL, and a write between two processes: real ones, and what is made of figures that do not occur here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.settings import KvTransferConfig
from leadout.doctor.check import Status
from leadout.doctor.child import Child
from leadout.doctor.nixl_checks import check_nixl
from leadout.doctor.transfer_checks import (
    check_memory_access,
    check_transfer,
    judge_bandwidth,
    judge_memory_access,
    judge_path,
)
from leadout.doctor.ucx_log import UcxLog

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_nixl_and_an_agent() -> None:
    package, agent = check_nixl(KvTransferConfig())
    assert (package.status, agent.status) == ("ok", "ok")
    assert package.data["package"].startswith("nixl")
    assert {"UCX", "POSIX"} <= {name for name, memory in package.data["plugins"].items() if memory}
    assert agent.data["backends"] == ["UCX"]


def test_a_back_end_that_does_not_exist() -> None:
    package, agent = check_nixl(KvTransferConfig(backends=["UCX", "NONESUCH"]))
    assert (package.status, agent.status) == ("ok", "failed")
    assert "NONESUCH" in agent.seen
    assert "kv_transfer.backends" in agent.remedy
    (transfer,) = check_transfer(KvTransferConfig(backends=["UCX", "NONESUCH"]))
    assert transfer.status == "failed"
    assert "NONESUCH" in transfer.seen


def test_ucx_says_why_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonesuch")
    _, agent = check_nixl(KvTransferConfig())
    assert agent.status == "failed"
    assert "UCX says: transport 'nonesuch' is not available" in agent.seen
    assert "UCX_TLS=nonesuch" in agent.remedy


def test_the_path_between_two_processes_and_its_speed() -> None:
    path, bandwidth = check_transfer(KvTransferConfig())
    assert path.data["ucx_version"]
    assert path.data["lanes"], "UCX has named its path"
    assert (path.status == "warning") == (path.data["transports"] == ["tcp"])
    assert bandwidth.data["num_bytes"] == 64 * 1024**2
    assert bandwidth.data["write_gbps"] > 0
    assert bandwidth.data["share"] == pytest.approx(
        bandwidth.data["write_gbps"] / bandwidth.data["copy_gbps"], abs=0.01
    )


def test_only_tcp_is_a_warning_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    path, _ = check_transfer(KvTransferConfig())
    assert path.status == "warning"
    assert path.data["transports"] == ["tcp"]
    assert "UCX_TLS=tcp,self" in path.seen
    assert "UCX_TLS" in path.remedy


def test_a_target_notices_that_nothing_arrived() -> None:
    with Child("transfer_peer", "target") as target:
        target.tell({"backends": ["UCX"], "num_blocks": 2})
        assert target.answer(60)["record"]
        target.tell({})
        assert target.answer(60) == {"intact": False}


def test_tcp_without_a_variable_points_at_the_kernel_and_the_container() -> None:
    finding = judge_path(UcxLog("1.23.0", "UCX_LOG_LEVEL=info UCX_PROTO_INFO=y", ("tcp/eth0",)))
    assert finding.status == "warning"
    assert "memory-access" in finding.remedy
    assert "UCX_LOG_LEVEL" not in finding.seen, "that is the check's own"


def test_a_path_that_is_not_known_is_no_warning() -> None:
    assert judge_path(UcxLog()).status == "skipped"


@pytest.mark.parametrize(("write", "status"), [(5.0, "ok"), (2.5, "ok"), (2.4, "warning")])
def test_bandwidth_is_judged_by_a_plain_copy(write: float, status: Status) -> None:
    finding = judge_bandwidth(write, 10.0, 64 * 1024**2)
    assert finding.status == status
    assert finding.seen.startswith(f"64 MiB to another process at {write:.1f} GB/s")


@pytest.mark.parametrize(
    ("scope", "may_trace", "status"),
    [
        (None, False, "ok"),
        (0, False, "ok"),
        (1, False, "ok"),  # UCX allows its peers itself
        (2, False, "warning"),
        (2, True, "ok"),
        (3, False, "warning"),
        (3, True, "warning"),
    ],
)
def test_who_may_write_another_process_s_memory(scope: int | None, may_trace: bool, status: Status) -> None:
    finding = judge_memory_access(scope, may_trace=may_trace, refusal=None)
    assert finding.status == status
    assert bool(finding.remedy) == (status == "warning")


def test_what_the_kernel_says_about_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"CapEff:\t{1 << 19:016x}\n")
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("2\n")
    data = check_memory_access(tmp_path).data
    assert (data["ptrace_scope"], data["cap_sys_ptrace"]) == (2, True)
    assert check_memory_access(tmp_path / "nothing").data["ptrace_scope"] is None


def test_a_sandbox_that_forbids_it_is_found_and_so_is_the_fall_back_to_tcp() -> None:
    """A real seccomp filter, as some container runtimes have it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.leadout.doctor.forbid_vm_writes"],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    access, path, bandwidth = json.loads(done.stdout)
    assert access["status"] == "warning"
    assert "process_vm_writev fails (Operation not permitted)" in access["seen"]
    assert path["status"] == "warning"
    assert path["data"]["transports"] == ["tcp"]
    assert "memory-access" in path["remedy"]
    assert bandwidth["data"]["write_gbps"] > 0
