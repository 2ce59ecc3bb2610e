"""A worker's row: what it reported, corrected by what was dispatched since."""

from __future__ import annotations

from cluster.load import KvLoad, LoadReport
from cluster.sequence_spec import RequestKey
from router.state.columns import UNLIMITED, Columns
from router.state.worker_view import WorkerView
from tests.router.factories import load_report, worker_record

ONE, TWO = RequestKey("r1", 0), RequestKey("r2", 0)


def view_of(role: str = "decode") -> tuple[WorkerView, Columns]:
    columns = Columns()
    return WorkerView(worker_record("w", role), 3, columns), columns


def loads(columns: Columns) -> tuple[int, int]:
    return int(columns.num_requests[3]), int(columns.prefill_tokens[3])


def test_dispatches_count_until_reported_and_never_below_own() -> None:
    view, columns = view_of()
    view.report(load_report(running=1))
    view.add_request(ONE)
    view.add_prefill(ONE, 100)
    view.add_request(TWO)
    assert loads(columns) == (3, 100)
    view.report(load_report(running=3, waiting_prefill_tokens=60))
    assert loads(columns) == (3, 100)
    view.report(load_report(running=0))  # a report that missed them
    assert loads(columns) == (2, 100)
    view.remove_request(ONE)
    view.remove_request(TWO)
    view.remove_prefill(ONE)
    assert loads(columns) == (0, 0)


def test_a_prefill_that_is_counted_again_counts_once() -> None:
    view, columns = view_of("prefill")
    view.add_prefill(ONE, 100)
    view.add_prefill(ONE, 40)
    assert loads(columns) == (1, 40)
    view.report(load_report(waiting_prefill_tokens=10))
    view.remove_prefill(ONE)
    view.remove_prefill(ONE)
    assert loads(columns) == (0, 10)


def test_the_requests_of_a_prefill_worker_are_its_prefills() -> None:
    view, columns = view_of("prefill")
    view.add_prefill(ONE, 5)
    view.add_prefill(TWO, 5)
    assert loads(columns) == (2, 10)
    view.take_over(worker_record("w", "decode", role_epoch=1))
    assert loads(columns) == (0, 10)


def test_what_fits_follows_from_the_record_and_the_report() -> None:
    view, columns = view_of()
    assert (columns.max_tokens[3], columns.kv_tokens_free[3]) == (127, UNLIMITED)
    view.report(LoadReport(state="ready", kv=KvLoad(blocks_total=10, blocks_free=7)))
    assert columns.max_tokens[3] == 39, "one place is for the next token"
    assert (columns.kv_blocks_free[3], columns.kv_tokens_free[3]) == (7, 28)


def test_it_accepts_while_it_says_so_and_can_be_reached() -> None:
    view, columns = view_of()
    seen = [bool(columns.accepts[3])]
    for change in (
        lambda: view.report(load_report()),
        lambda: view.set_reachable(False),
        lambda: view.report(load_report()),
        lambda: view.set_reachable(True),
        lambda: view.report(load_report(state="draining")),
    ):
        change()
        seen.append(bool(columns.accepts[3]))
    assert seen == [False, True, False, False, True, False]
    assert columns.num_accept_changes == 4
