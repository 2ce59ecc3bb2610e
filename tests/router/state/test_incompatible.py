"""What cannot work together is said by groups."""

from __future__ import annotations

from router.state.incompatible import incompatible_groups
from tests.router.factories import model_identity, worker_record

HALF = model_identity(dtype="float16")


def test_two_groups_are_one_entry_however_many_workers_they_have() -> None:
    records = [worker_record(f"d{number}") for number in range(50)]
    records += [worker_record(f"p{number}", "prefill", model=HALF) for number in range(50)]
    (found,) = incompatible_groups(records)
    assert found.workers == tuple(record.id for record in records)
    assert found.reason == "dtype differs: d0 has float32, p0 has float16"


def test_groups_that_need_not_work_together() -> None:
    both_decode = [worker_record("d0"), worker_record("d1", model=HALF)]
    assert incompatible_groups(both_decode) == []
    other_model = [worker_record("d0"), worker_record("p0", "prefill", model=model_identity(name="other"))]
    assert incompatible_groups(other_model) == []
    assert incompatible_groups([worker_record("d0"), worker_record("p0", "prefill")]) == []


def test_only_those_on_either_side_are_named() -> None:
    records = [
        worker_record("d0"),
        worker_record("p0", "prefill"),
        worker_record("p1", "prefill", model=HALF),
    ]
    (found,) = incompatible_groups(records)
    assert found.workers == ("d0", "p1")
