"""Python, torch, number formats, cores and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.settings import LeadoutConfig
from leadout.doctor import machine_checks as checks
from leadout.doctor.check import Status

_MIB, _GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("version", "system", "processor", "status"),
    [
        ((3, 11, 0), "linux", "x86_64", "ok"),
        ((3, 13, 1), "linux", "aarch64", "ok"),
        ((3, 10, 9), "linux", "x86_64", "failed"),
        ((3, 12, 0), "darwin", "arm64", "failed"),
        ((3, 12, 0), "linux", "riscv64", "failed"),
    ],
)
def test_platforms(version: tuple[int, ...], system: str, processor: str, status: Status) -> None:
    finding = checks.judge_platform(version, "CPython", system, processor)
    assert finding.status == status
    assert processor in finding.seen
    assert bool(finding.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("configured", "float16", "native", "status", "dtype"),
    [
        ("auto", True, True, "ok", "float16"),
        ("auto", False, True, "ok", "float32"),
        ("float32", True, True, "ok", "float32"),
        ("float16", True, False, "ok", "float16"),
        ("float16", False, False, "failed", "float16"),
        ("bfloat16", True, True, "warning", "bfloat16"),
        ("bfloat16", True, False, "warning", "bfloat16"),
    ],
)
def test_number_formats(configured: str, float16: bool, native: bool, status: Status, dtype: str) -> None:
    finding = checks.judge_dtype(
        configured, ["avx2", "avx512_f", "popcnt"], float16_linear=float16, native_bfloat16=native
    )
    assert (finding.status, finding.data["dtype"]) == (status, dtype)
    assert "avx2, avx512_f" in finding.seen
    assert "popcnt" not in finding.seen


def test_torch_and_the_dtype_that_the_engine_would_take() -> None:
    from engine.ops.number_formats import has_float16_linear, number_formats

    torch, dtype, cuda = checks.check_torch("auto")
    assert torch.status == dtype.status == "ok"
    assert dtype.data["dtype"] == number_formats("auto", has_float16=has_float16_linear())[0].name
    assert cuda.about == "cuda"


def test_gpus_that_torch_sees() -> None:
    device = {"name": "H100", "memory_bytes": 80 * _GIB, "capability": "9.0", "peers": []}
    finding = checks.judge_cuda({"devices": [device], "cuda_version": "12.8"})
    assert (finding.status, finding.seen) == ("ok", "CUDA 12.8: H100 (80 GiB)")
    assert checks.judge_cuda({"devices": [], "cuda_version": "12.8"}).status == "skipped"
    assert "CPU build" in checks.judge_cuda({"devices": [], "cuda_version": None}).seen


@pytest.mark.parametrize(
    ("visible", "quota", "num_threads", "status"),
    [
        (8, None, 0, "ok"),
        (8, 8.0, 0, "ok"),
        (8, 2.0, 0, "warning"),
        (8, 2.0, 2, "ok"),
        (8, 2.0, 4, "warning"),
        (8, 0.5, 0, "warning"),
        (8, None, 9, "warning"),
    ],
)
def test_cores(visible: int, quota: float | None, num_threads: int, status: Status) -> None:
    finding = checks.judge_cores(visible, quota, num_threads)
    assert finding.status == status
    assert bool(finding.remedy) == (status != "ok")


def test_a_quota_names_a_number_of_threads_that_fits() -> None:
    assert "have 2 threads" in checks.judge_cores(8, 2.7, 0).remedy
    assert "have 1 thread:" in checks.judge_cores(8, 0.5, 0).remedy


@pytest.mark.parametrize(
    ("total", "free", "status", "hint"),
    [
        (64 * _MIB, 64 * _MIB, "warning", "--shm-size=1g"),
        (_GIB, _GIB, "ok", ""),
        (8 * _GIB, 10 * _MIB, "warning", "remove what dead processes have left"),
    ],
)
def test_shared_memory(total: int, free: int, status: Status, hint: str) -> None:
    finding = checks.judge_shm(total, free, "/dev/shm")
    assert finding.status == status
    assert hint in finding.remedy


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    assert checks.check_shm(tmp_path / "shm").status == "failed"


@pytest.mark.parametrize(
    ("soft", "status"), [(-1, "ok"), (1536, "ok"), (1535, "warning"), (256, "warning"), (255, "failed")]
)
def test_open_files(soft: int, status: Status) -> None:
    finding = checks.judge_open_files(soft, 4096, 1024)
    assert finding.status == status
    assert ("ulimit -n" in finding.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("soft", "has_rdma", "is_exempt", "status"),
    [
        (8 * _MIB, False, False, "ok"),
        (8 * _MIB, True, False, "failed"),
        (8 * _MIB, True, True, "ok"),
        (_GIB, True, False, "ok"),
        (-1, True, False, "ok"),
    ],
)
def test_locked_memory(soft: int, has_rdma: bool, is_exempt: bool, status: Status) -> None:
    finding = checks.judge_locked_memory(soft, 512 * _MIB, has_rdma=has_rdma, is_exempt=is_exempt)
    assert finding.status == status
    assert ("memlock" in finding.remedy) == (status != "ok")


def test_this_machine() -> None:
    config = LeadoutConfig()
    for finding in (
        checks.check_python(),
        checks.check_cores(config),
        checks.check_shm(),
        checks.check_open_files(config),
        checks.check_locked_memory(config),
    ):
        assert finding.seen
        assert bool(finding.remedy) == (finding.status != "ok")
