"""Membership, incarnations, KV events and load corrections."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from cluster.block_hash import hash_blocks, root_hash
from cluster.kv_layout import KvLayout
from cluster.members import WorkerRecord
from cluster.messages import Cancel, KvEvents, LoadUpdate, Subscribe, TokenBatch
from cluster.rpc import RpcError
from cluster.sequence_spec import RequestKey
from router.cluster_view import ClusterView, WorkerUnreachableError
from router.state.prompt_hashes import PromptHashes
from tests.router.count_calls import number_of_calls
from tests.router.factories import Connections, load_report, members_of, model_identity, worker_record


class Harness:
    def __init__(self) -> None:
        self.connections = Connections()
        self.dropped: list[str] = []
        self.lost: list[str] = []
        self.batches: list[tuple[str, TokenBatch]] = []
        self.view = ClusterView(
            connect=self.connections,
            on_tokens=lambda worker, batch: self.batches.append((worker, batch)),
            on_worker_lost=self.lost.append,
            on_dropped=self.dropped.append,
            vocab_sizes={"test-model": 1000},
        )

    def members(self, *records: WorkerRecord) -> None:
        self.view.update(members_of(*records))


def num_blocks(harness: Harness, worker: str) -> int:
    view = harness.view.state.get(worker)
    assert view is not None
    return harness.view.state.kv_index.num_blocks(view.slot)


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_a_new_worker_is_subscribed_to_and_renewed(harness: Harness) -> None:
    harness.members(worker_record("d0"), worker_record("p0", "prefill"))
    for name in ("d0", "p0"):
        assert harness.connections[name].take(Subscribe) == [Subscribe()]
    harness.view.heartbeat()
    assert harness.connections["p0"].take(Subscribe) == [Subscribe()]


def test_restart_closes_the_old_connection_and_drops_its_messages(harness: Harness) -> None:
    harness.members(worker_record("d0"))
    old = harness.connections["d0"]
    old.answer(KvEvents(sequence=0, stored=[b"x"], snapshot=True))
    harness.members(worker_record("d0", incarnation=2))
    assert old.is_closed
    assert harness.lost == ["d0"]
    assert len(harness.view.state.kv_index) == 0
    old.answer(LoadUpdate(load=load_report()))
    assert harness.dropped == ["old_incarnation"]
    assert harness.view.state.workers[0].load is None


def test_an_older_record_does_not_replace_a_newer_one(harness: Harness) -> None:
    harness.members(worker_record("d0", incarnation=5))
    harness.members(worker_record("d0", incarnation=4))
    assert harness.view.state.workers[0].record.incarnation == 5
    assert harness.dropped == ["old_incarnation"]
    assert harness.lost == []


def test_a_worker_that_left_cannot_be_sent_to(harness: Harness) -> None:
    harness.members(worker_record("d0"))
    harness.members()
    assert harness.lost == ["d0"]
    with pytest.raises(WorkerUnreachableError, match="d0 has left"):
        harness.view.send("d0", Subscribe())


def test_losses_are_reported_after_the_members_are_current(harness: Harness) -> None:
    seen: list[list[str]] = []
    view = ClusterView(
        connect=harness.connections,
        on_tokens=lambda worker, batch: None,
        on_worker_lost=lambda worker: seen.append([w.record.id for w in view.state.workers]),
        on_dropped=harness.dropped.append,
    )
    view.update(members_of(worker_record("d0"), worker_record("d1")))
    view.update(members_of(worker_record("d2")))
    assert seen == [["d2"], ["d2"]]


def test_kv_events_need_a_snapshot_first(harness: Harness) -> None:
    harness.members(worker_record("d0"))
    connection = harness.connections["d0"]
    connection.take(Subscribe)
    connection.answer(KvEvents(sequence=7, stored=[b"a"]))
    assert len(connection.take(Subscribe)) == 1
    assert len(harness.view.state.kv_index) == 0
    connection.answer(KvEvents(sequence=9, stored=[b"a", b"b"], snapshot=True))
    connection.answer(KvEvents(sequence=10, stored=[b"c"], removed=[b"a"]))
    assert num_blocks(harness, "d0") == 2
    assert harness.dropped == ["kv_event_gap"]


def test_a_gap_asks_for_a_new_snapshot(harness: Harness) -> None:
    harness.members(worker_record("d0"))
    connection = harness.connections["d0"]
    connection.answer(KvEvents(sequence=1, stored=[b"a"], snapshot=True))
    connection.take(Subscribe)
    connection.answer(KvEvents(sequence=3, stored=[b"c"]))
    connection.answer(KvEvents(sequence=4, stored=[b"d"]))
    assert connection.take(Subscribe)
    assert harness.view.state.kv_index.holders(b"c") == 0
    connection.answer(KvEvents(sequence=4, stored=[b"c", b"d"], snapshot=True))
    assert num_blocks(harness, "d0") == 2
    connection.answer(KvEvents(sequence=4, stored=[b"e"]))
    assert harness.dropped[-1] == "old_kv_event"


def test_prefix_hits_are_found_per_salt(harness: Harness) -> None:
    """The same hashes for workers of another layout, if model and block size are the same."""
    other = KvLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, dtype="float16", tp_size=2)
    d0 = worker_record("d0")
    harness.members(d0, worker_record("d1", kv_layout=other, endpoints=d0.endpoints * 2))
    tokens = list(range(10))
    hashes = hash_blocks(tokens, 4, root_hash("f" * 64, 4))
    harness.connections["d1"].answer(KvEvents(sequence=0, stored=hashes, snapshot=True))
    state = harness.view.state
    pool = state.pool("test-model")
    assert list(state.cached_tokens(pool, PromptHashes(tokens), 10)[pool.decode]) == [0, 8]
    assert list(state.cached_tokens(pool, PromptHashes(tokens), 8)[pool.decode]) == [0, 4]
    assert list(state.cached_tokens(pool, PromptHashes(tokens, "salt"), 10)[pool.decode]) == [0, 0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol_version": 99}, "protocol version differs: d0 has 99"),
        ({"model": model_identity(vocab_size=10)}, "vocabulary differs: d0 has 10 tokens"),
    ],
)
def test_workers_this_router_cannot_use_are_reported(
    harness: Harness, fields: dict[str, Any], reason: str
) -> None:
    harness.members(worker_record("d0", **fields))
    assert harness.view.state.workers == ()
    (item,) = harness.view.incompatible
    assert item.workers == ("d0",)
    assert item.reason.startswith(reason)


def test_pairs_that_cannot_hand_over_are_reported(harness: Harness) -> None:
    other = model_identity(dtype="bfloat16")
    harness.members(
        worker_record("d0"), worker_record("p0", "prefill"), worker_record("p1", "prefill", model=other)
    )
    (item,) = harness.view.incompatible
    assert item.workers == ("d0", "p1")
    assert "dtype differs" in item.reason


def test_unknown_senders_are_counted(harness: Harness) -> None:
    harness.members(worker_record("d0"))
    connection = harness.connections["d0"]
    harness.members()
    connection.answer(LoadUpdate(load=load_report()))
    assert harness.dropped == ["unknown_sender"]


# --- broken connections ------------------------------------------------------------------------------------


def ready(harness: Harness, *names: str) -> None:
    """These decode workers are members, have reported, and have sent their snapshot."""
    harness.members(*(worker_record(name) for name in names))
    for name in names:
        connection = harness.connections[name]
        connection.answer(LoadUpdate(load=load_report()))
        connection.answer(KvEvents(sequence=4, stored=[b"a"], snapshot=True))
        connection.take(Subscribe)


def accepts(harness: Harness) -> dict[str, bool]:
    state = harness.view.state
    return {view.record.id: bool(state.columns.accepts[view.slot]) for view in state.workers}


def test_a_worker_whose_connection_breaks_is_unreachable_and_its_requests_are_lost(harness: Harness) -> None:
    ready(harness, "d0", "d1")
    assert accepts(harness) == {"d0": True, "d1": True}
    assert harness.view.state.models(ready=True) == ["test-model"]
    harness.connections["d0"].disconnect()
    assert harness.lost == ["d0"]
    assert accepts(harness) == {"d0": False, "d1": True}
    view = harness.view.state.get("d0")
    assert view is not None, "it is still a member"
    assert (view.state, view.is_ready) == ("unreachable", False)
    harness.connections["d1"].disconnect()
    assert harness.view.state.models(ready=True) == []
    assert harness.view.state.models(ready=False) == ["test-model"]


def test_a_loss_is_told_once_while_it_lasts(harness: Harness) -> None:
    """The connection may break again at each attempt to renew it."""
    ready(harness, "d0")
    for _ in range(3):
        harness.connections["d0"].disconnect()
    assert harness.lost == ["d0"]
    harness.connections["d0"].answer(LoadUpdate(load=load_report()))
    harness.connections["d0"].disconnect()
    assert harness.lost == ["d0", "d0"], "another loss, after it was back"


def test_a_lost_worker_that_leaves_is_told_again(harness: Harness) -> None:
    """What was moved back to it in between, because it had been reachable again, is lost only now. For what
    was lost before, nothing is left to do."""
    ready(harness, "d0")
    harness.connections["d0"].disconnect()
    harness.members()
    assert harness.lost == ["d0", "d0"]
    assert harness.view.state.workers == ()


def test_the_next_message_of_an_unreachable_worker_makes_it_reachable(harness: Harness) -> None:
    ready(harness, "d0")
    harness.connections["d0"].disconnect()
    harness.connections["d0"].answer(TokenBatch(outputs=[]))
    view = harness.view.state.get("d0")
    assert view is not None
    assert (view.state, view.is_ready) == ("ready", True), "what it said last holds"
    assert accepts(harness) == {"d0": True}
    harness.connections["d0"].answer(LoadUpdate(load=load_report(state="draining")))
    assert view.state == "draining"


def test_a_message_of_another_incarnation_is_no_sign_of_life(harness: Harness) -> None:
    harness.members(worker_record("d0", incarnation=5))
    connection = harness.connections["d0"]
    connection.answer(LoadUpdate(load=load_report()))
    connection.disconnect()
    connection.answer(LoadUpdate(load=load_report()), incarnation=4)
    connection.answer(LoadUpdate(load=load_report()), incarnation=6)
    assert accepts(harness) == {"d0": False}
    assert harness.dropped == ["old_incarnation", "unknown_incarnation"]


def test_after_a_break_the_whole_cache_is_asked_for_until_it_came(harness: Harness) -> None:
    """Events may be lost. What is known stays until then: it is better than nothing."""
    ready(harness, "d0")
    connection = harness.connections["d0"]
    harness.view.heartbeat()
    assert connection.take(Subscribe) == [Subscribe(snapshot=False)], "else this shows nothing"
    connection.disconnect()
    for _ in range(2):
        harness.view.heartbeat()
    assert connection.take(Subscribe) == [Subscribe(snapshot=True)] * 2
    assert num_blocks(harness, "d0") == 1
    connection.answer(KvEvents(sequence=5, stored=[b"b"]))
    assert harness.view.state.kv_index.holders(b"b") == 0, "the event before it may be missing"
    connection.take(Subscribe)
    connection.answer(KvEvents(sequence=6, stored=[b"c"], snapshot=True))
    harness.view.heartbeat()
    assert connection.take(Subscribe) == [Subscribe(snapshot=False)]
    assert harness.view.state.kv_index.holders(b"a") == 0
    assert harness.view.state.kv_index.holders(b"c") == 1


def test_the_break_of_a_former_connection_changes_nothing(harness: Harness) -> None:
    ready(harness, "d0")
    old = harness.connections["d0"]
    harness.members(worker_record("d0", incarnation=2))
    harness.connections["d0"].answer(LoadUpdate(load=load_report()))
    assert harness.lost == ["d0"]
    old.disconnect()
    assert harness.lost == ["d0"]
    assert accepts(harness) == {"d0": True}
    harness.members()
    old.disconnect()
    assert harness.lost == ["d0", "d0"], "one for each incarnation that left"


def test_a_router_that_stood_still_suspects_everybody(harness: Harness) -> None:
    ready(harness, "d0", "d1")
    harness.view.suspect_all()
    assert sorted(harness.lost) == ["d0", "d1"]
    assert accepts(harness) == {"d0": False, "d1": False}
    harness.view.heartbeat()
    assert harness.connections["d0"].take(Subscribe) == [Subscribe(snapshot=True)]
    harness.connections["d0"].answer(LoadUpdate(load=load_report()))
    assert accepts(harness) == {"d0": True, "d1": False}
    harness.view.suspect_all()
    assert sorted(harness.lost) == ["d0", "d0", "d1"], "who is lost already is not lost again"


def test_a_broken_worker_can_still_be_sent_to(harness: Harness) -> None:
    """What is queued goes out when the connection is back: so a cancel reaches it."""
    ready(harness, "d0")
    harness.connections["d0"].disconnect()
    cancel = Cancel(key=RequestKey("r", 0), reason="moved")
    assert harness.view.send("d0", cancel) == 1
    assert harness.connections["d0"].take(Cancel) == [cancel]


# --- lists of members ---------------------------------------------------------------------------------------


def test_the_same_members_again_cost_nothing() -> None:
    """Counted in calls: as many for 300 workers as for 3."""

    def calls(num_workers: int) -> int:
        harness = Harness()
        members = members_of(*(worker_record(f"w{number}") for number in range(num_workers)))
        harness.view.update(members)
        return number_of_calls(lambda: harness.view.update(structs.replace(members)))

    assert calls(300) == calls(3)


def test_a_worker_that_could_not_be_connected_is_tried_with_the_next_list(harness: Harness) -> None:
    is_down = True

    def connect(record: WorkerRecord, on_message: Any, on_disconnected: Any) -> Any:
        if is_down:
            raise RpcError("too many open files")
        return harness.connections(record, on_message, on_disconnected)

    view = ClusterView(
        connect=connect,
        on_tokens=lambda worker, batch: None,
        on_worker_lost=harness.lost.append,
        on_dropped=harness.dropped.append,
    )
    members = members_of(worker_record("d0"))
    view.update(members)
    assert [item.reason for item in view.incompatible] == ["d0: too many open files"]
    is_down = False
    view.update(members)
    assert [worker.record.id for worker in view.state.workers] == ["d0"]
    assert view.incompatible == ()


def test_incompatible_workers_are_warned_of_once(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    records = [worker_record("d0"), worker_record("p1", "prefill", model=model_identity(dtype="bfloat16"))]
    harness.members(*records)
    harness.members(*records, worker_record("d1"))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["workers cannot work together: dtype differs: d0 has float32, p1 has bfloat16"]
