"""What is read from ``/proc`` and ``/sys``, laid out under a folder as kernels with cgroups 1 and 2 do."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.doctor.system_files import cpu_quota, has_capability, memory_state, read_text

_GIB = 1024**3


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 16 GiB with 8 GiB available."""
    fields = ["MemTotal: 16777216 kB", "MemFree: 5 kB", "MemAvailable: 8388608 kB", "HugePages_Total: 0"]
    _write(tmp_path, {"proc/meminfo": "\n".join(fields)})
    return tmp_path


def test_memory_without_control_groups(root: Path) -> None:
    state = memory_state(root)
    assert (state.total, state.available, state.limit) == (16 * _GIB, 8 * _GIB, None)


def test_memory_of_a_container_is_what_its_group_leaves(root: Path) -> None:
    _write(
        root,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * _GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * _GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {_GIB}\n",
        },
    )
    state = memory_state(root)
    assert (state.available, state.limit, state.used) == (2 * _GIB, 4 * _GIB, 2 * _GIB)


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    _write(
        root,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{2 * _GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{_GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{_GIB}\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        },
    )
    assert memory_state(root).limit == 2 * _GIB
    assert cpu_quota(root) == 1.5


def test_control_groups_of_version_1(root: Path) -> None:
    _write(
        root,
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{_GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_state(root).available == _GIB
    assert cpu_quota(root) == 0.5


def test_more_used_than_allowed_leaves_nothing(root: Path) -> None:
    _write(root, {"sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "200\n"})
    assert memory_state(root).available == 0


def test_a_machine_without_meminfo_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/proc/meminfo"):
        memory_state(tmp_path)


def test_capabilities(tmp_path: Path) -> None:
    assert not has_capability(tmp_path, 19)
    _write(tmp_path, {"proc/self/status": "Name: x\nCapPrm:\t0\nCapEff:\t0000000000080000\n"})
    assert has_capability(tmp_path, 19)
    assert not has_capability(tmp_path, 18)


def test_no_file_is_none(tmp_path: Path) -> None:
    assert read_text(tmp_path, "proc/nothing") is None


def test_this_machine() -> None:
    state = memory_state(Path("/"))
    assert 0 < state.available <= state.total
    quota = cpu_quota(Path("/"))
    assert quota is None or quota > 0
