"""How cores are divided among engine processes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadout.cpu_plan import Core, CpuShare, available_cores, plan_cpus


def _cores(count: int) -> list[Core]:
    return [Core(0, cpu, cpu) for cpu in range(count)]


def test_cores_are_divided_evenly_and_the_rest_stays_free() -> None:
    assert plan_cpus(_cores(7), 3) == [CpuShare(2, (0, 1)), CpuShare(2, (2, 3)), CpuShare(2, (4, 5))]


def test_threads_that_were_asked_for_are_given() -> None:
    assert plan_cpus(_cores(8), 2, num_threads=3) == [CpuShare(3, (0, 1, 2)), CpuShare(3, (3, 4, 5))]


def test_processes_share_cores_unpinned_if_there_are_too_few() -> None:
    assert plan_cpus(_cores(2), 3) == [CpuShare(1, ())] * 3
    assert plan_cpus(_cores(4), 2, num_threads=4) == [CpuShare(4, ())] * 2


def test_a_process_gets_both_hardware_threads_of_a_core() -> None:
    # Many machines number the second hardware threads after all the first ones.
    cores = [Core(0, 0, 0), Core(0, 1, 1), Core(0, 0, 2), Core(0, 1, 3)]
    assert [share.cpus for share in plan_cpus(cores, 2)] == [(0, 2), (1, 3)]


def test_a_process_stays_on_one_package_where_it_can() -> None:
    # Core ids repeat in each package.
    cores = [Core(package, core, 2 * core + package) for core in range(2) for package in range(2)]
    assert [share.cpus for share in plan_cpus(cores, 2)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("num_cores", "num_processes"), [(0, 1), (4, 0), (4, -1)])
def test_impossible_divisions_are_refused(num_cores: int, num_processes: int) -> None:
    with pytest.raises(ValueError, match=f"{num_cores} cores among {num_processes} processes"):
        plan_cpus(_cores(num_cores), num_processes)


@given(num_cores=st.integers(1, 128), num_processes=st.integers(1, 40), num_threads=st.integers(0, 130))
def test_pinned_processes_never_share_a_core(num_cores: int, num_processes: int, num_threads: int) -> None:
    shares = plan_cpus(_cores(num_cores), num_processes, num_threads)
    assert len(shares) == num_processes
    assert len({share.num_threads for share in shares}) == 1
    assert shares[0].num_threads == (num_threads or max(1, num_cores // num_processes))
    pinned = [cpu for share in shares for cpu in share.cpus]
    assert len(pinned) == len(set(pinned))
    assert set(pinned) <= set(range(num_cores))
    fits = shares[0].num_threads * num_processes <= num_cores
    assert all(len(share.cpus) == (share.num_threads if fits else 0) for share in shares)


def test_the_libraries_are_told_the_number_of_threads() -> None:
    environment = CpuShare(3, ()).environment()
    assert {environment[name] for name in environment if name.endswith("_NUM_THREADS")} == {"3"}
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_only_cores_that_this_process_may_use_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5, 0, 3}, raising=False)
    assert [core.cpu for core in available_cores()] == [0, 3, 5]


def test_all_cores_are_available_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert [core.cpu for core in available_cores()] == [0, 1, 2]


def test_a_core_of_unknown_place_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {99_999}, raising=False)
    assert available_cores() == [Core(0, 99_999, 99_999)]
