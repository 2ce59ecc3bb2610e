"""GPUs, their links and RDMA adapters: none runs here, so the driver's and the kernel's answers are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadout.doctor import accelerator_checks as checks
from leadout.doctor.accelerator_checks import Gpu, RdmaPort, parse_gpus, parse_topology

_LISTING = "0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 00000000:19:00.0\n1, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 00000000:3B:00.0\n"  # noqa: E501
_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\tPIX\t0-55,112-167\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def _install_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An ``nvidia-smi`` that does what ``script`` says, as the only program on the PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_listing() -> None:
    assert parse_gpus(_LISTING)[1] == Gpu(1, "NVIDIA H100 80GB HBM3", "550.54.15", 81559, "00000000:3B:00.0")
    unified = parse_gpus("0, NVIDIA GB10, 580.95, [N/A], 0000000F:01:00.0\n")
    assert unified[0].memory_mib is None
    assert parse_gpus("No devices were found\n") == []
    with pytest.raises(ValueError, match="not understood: 'Unable to"):
        parse_gpus("Unable to determine the device handle\n")


def test_a_topology() -> None:
    assert parse_topology(_TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    with pytest.raises(ValueError, match="no table"):
        parse_topology("Failed to initialize NVML\n")


@given(
    st.integers(1, 16).flatmap(
        lambda count: st.lists(
            st.lists(st.sampled_from(["NV4", "NV18", "PIX", "PXB", "SYS"]), min_size=count, max_size=count),
            min_size=count,
            max_size=count,
        )
    ),
    st.integers(0, 4),
)
def test_a_topology_of_any_size_is_read_back(matrix: list[list[str]], num_adapters: int) -> None:
    count = len(matrix)
    names = [*(f"GPU{index}" for index in range(count)), *(f"NIC{index}" for index in range(num_adapters))]
    rows = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    for index, row in enumerate(matrix):
        cells = [" X " if other == index else link for other, link in enumerate(row)]
        rows.append("\t".join([f"GPU{index}", *cells, *["SYS"] * num_adapters, "0-3", "0"]))
    assert parse_topology("\n".join(rows)) == {
        (one, other): matrix[one][other] for one in range(count) for other in range(one + 1, count)
    }


def test_links() -> None:
    assert checks.judge_links({(0, 1): "NV18", (0, 2): "NV18"}).status == "ok"
    mixed = checks.judge_links({(0, 1): "NV4", (0, 2): "SYS"})
    assert mixed.status == "warning"
    assert "0-2" in mixed.remedy
    assert "0-1" not in mixed.remedy
    without = checks.judge_links({(0, 1): "PHB"})
    assert without.status == "ok"
    assert "no NVLink" in without.seen


def test_a_machine_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "listing").write_text(_LISTING)
    (tmp_path / "topology").write_text(_TOPOLOGY)
    _install_smi(
        tmp_path,
        monkeypatch,
        f'if [ "$1" = topo ]; then file=topology; else file=listing; fi\n'
        f'while IFS= read -r line; do printf "%s\\n" "$line"; done < {tmp_path}/$file',
    )
    gpus, links = checks.check_gpus()
    assert gpus.status == "ok"
    assert gpus.seen.startswith("driver 550.54.15: NVIDIA H100 80GB HBM3 (80 GiB), ")
    assert links.data["links"][0] == {"gpus": [0, 1], "link": "NV18"}


def test_a_broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_smi(
        tmp_path, monkeypatch, 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18'
    )
    (finding,) = checks.check_gpus()
    assert finding.status == "failed"
    assert "status 18: Failed to initialize NVML: Driver/library version mismatch" in finding.seen


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = checks.check_gpus()
    assert finding.status == "skipped"


def _add_port(root: Path, device: str, port: int, **files: str) -> None:
    folder = root / "sys/class/infiniband" / device / "ports" / str(port)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_adapters(tmp_path: Path) -> None:
    _add_port(tmp_path, "mlx5_0", 1, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
    _add_port(tmp_path, "mlx5_1", 1, state="1: DOWN", rate="40 Gb/sec (4X QDR)", link_layer="Ethernet")
    assert checks.rdma_ports(tmp_path) == [
        RdmaPort("mlx5_0", 1, "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        RdmaPort("mlx5_1", 1, "DOWN", "40 Gb/sec (4X QDR)", "Ethernet"),
    ]
    (finding,) = checks.check_rdma(tmp_path)
    assert finding.status == "warning"
    assert "/dev/infiniband is missing" in finding.seen
    (tmp_path / "dev/infiniband/uverbs0").mkdir(parents=True)
    (finding,) = checks.check_rdma(tmp_path)
    assert finding.status == "warning"
    assert "not active: mlx5_1:1." in finding.remedy


def test_adapters_that_are_well_and_reach_gpu_memory(tmp_path: Path) -> None:
    _add_port(tmp_path, "mlx5_0", 1, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
    (tmp_path / "dev/infiniband/uverbs0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    ports, gpudirect = checks.check_rdma(tmp_path)
    assert ports.status == "ok"
    assert gpudirect.status == "warning"
    assert "modprobe nvidia_peermem" in gpudirect.remedy
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert checks.check_rdma(tmp_path)[1].status == "ok"


def test_no_adapter(tmp_path: Path) -> None:
    (finding,) = checks.check_rdma(tmp_path)
    assert finding.status == "skipped"
