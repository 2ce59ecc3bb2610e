"""How cores are divided among engine processes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadout.cpu_plan import available_cores, thread_environment, threads_per_process


@given(num_cores=st.integers(1, 256), num_processes=st.integers(1, 40))
def test_processes_never_use_more_cores_than_there_are_unless_each_has_one(
    num_cores: int, num_processes: int
) -> None:
    threads = threads_per_process(num_cores, num_processes)
    assert threads == 1 or threads * num_processes <= num_cores
    assert (threads + 1) * num_processes > num_cores


@pytest.mark.parametrize(("num_cores", "num_processes"), [(0, 1), (4, 0), (4, -1)])
def test_impossible_divisions_are_refused(num_cores: int, num_processes: int) -> None:
    with pytest.raises(ValueError, match=f"{num_cores} cores among {num_processes} processes"):
        threads_per_process(num_cores, num_processes)


def test_only_cores_that_the_process_may_use_count() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert available_cores() == len(allowed)


def test_every_numerical_library_is_told_and_idle_threads_sleep() -> None:
    environment = thread_environment(3)
    assert environment.pop("OMP_WAIT_POLICY") == "PASSIVE"
    assert set(environment.values()) == {"3"}
