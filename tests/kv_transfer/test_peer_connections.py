"""Who gets connected, when a peer counts as lost, and what failures lead to."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cluster.members import Peer, WorkerRecord
from kv_transfer.transport import TransferError
from tests.kv_transfer.peers import FakeTransport, Harness, record


@pytest.fixture
def harness() -> Harness:
    return Harness()


# --- who gets connected ---------------------------------------------------------------------------------


def test_a_partner_is_connected_once(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.connections.update([harness.own.record, d0.record])
    assert harness.connections.get("d0") is None, "not before the transport is done"
    assert not harness.connections.is_settled
    harness.pump()
    assert harness.connections.get("d0") == d0.peer
    assert harness.connections.is_settled
    harness.update(harness.own.record, d0.record)
    assert harness.take_events() == [("connected", d0.peer)]
    assert harness.is_quiet()


def test_without_workers_all_is_settled(harness: Harness) -> None:
    harness.update()
    harness.update(harness.own.record)
    assert harness.connections.is_settled
    assert harness.connections.get("p0") is None
    assert harness.connections.get("unknown") is None


def test_workers_of_every_role_are_connected(harness: Harness) -> None:
    p1, d0, d1 = harness.start("p1", "prefill"), harness.start("d0"), harness.start("d1")
    harness.update(harness.own.record, p1.record, d0.record, d1.record, completions=3)
    assert harness.agents == [p1.peer, d0.peer, d1.peer]
    assert harness.connections.get("p1") == p1.peer


def test_own_id_is_left_alone(harness: Harness) -> None:
    """Be it the record of another life of this worker, in another role."""
    harness.update(harness.own.record, record("p0", "decode"))
    assert harness.connections.is_settled
    assert harness.agents == []


def test_an_incompatible_worker_is_refused_with_the_reason(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    other = record("d0", "decode", fingerprint="another")
    for _ in range(3):
        harness.update(other)
    assert harness.connections.get("d0") is None
    assert caplog.text.count("worker d0 is not compatible: model fingerprint differs: p0 has f") == 1
    harness.update(record("d0", "decode", fingerprint="a third"))
    assert "d0 has a third" in caplog.text


def test_a_worker_that_returns_compatible_is_connected(harness: Harness) -> None:
    harness.update(record("d0", "decode", 1, fingerprint="another"))
    d0 = harness.start("d0", incarnation=2)
    harness.update(d0.record, completions=1)
    assert harness.connections.get("d0") == d0.peer


def test_a_worker_that_returns_incompatible_is_lost(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.update(record("d0", "decode", 2, fingerprint="another"), completions=1)
    assert harness.take_events() == [("connected", d0.peer), ("lost", d0.peer)]
    assert harness.connections.get("d0") is None


# --- leaving --------------------------------------------------------------------------------------------


def test_a_worker_that_leaves_is_lost_after_its_agent_is_removed(harness: Harness) -> None:
    d0, d1 = harness.start("d0"), harness.start("d1")
    harness.update(d0.record, d1.record, completions=2)
    harness.take_events()
    harness.connections.update([d1.record])
    assert harness.connections.get("d0") is None, "nothing new is begun with it"
    assert harness.events == [], "but it may still be written to"
    harness.connections.update([d1.record])
    harness.pump()
    assert harness.take_events() == [("lost", d0.peer)]
    assert harness.agents == [d1.peer]
    assert harness.is_quiet(), "it is removed once"


def test_a_worker_that_leaves_while_it_is_connected_to(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.connections.update([d0.record])
    harness.connections.update([])
    harness.pump(2)
    assert harness.take_events() == [("lost", d0.peer)], "it was never reported as connected"
    assert harness.agents == []
    harness.update(d0.record, completions=1)
    assert harness.take_events() == [("connected", d0.peer)]


def test_a_worker_that_returns_unchanged_is_connected_after_it_was_lost(harness: Harness) -> None:
    """As after a lease that ended during a long pause."""
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.connections.update([])
    harness.connections.update([d0.record])
    assert harness.connections.get("d0") is None, "it is lost first"
    harness.pump()
    harness.update(d0.record, completions=1)
    assert harness.take_events() == [("connected", d0.peer), ("lost", d0.peer), ("connected", d0.peer)]


# --- restarts -------------------------------------------------------------------------------------------


def test_a_restarted_worker_is_lost_and_then_connected(harness: Harness) -> None:
    old, new = harness.start("d0", incarnation=1), harness.start("d0", incarnation=2)
    harness.update(old.record, completions=1)
    harness.update(new.record, completions=1)
    assert harness.connections.get("d0") is None
    harness.update(new.record, completions=1)
    assert harness.connections.get("d0") == new.peer
    assert harness.take_events() == [("connected", old.peer), ("lost", old.peer), ("connected", new.peer)]
    assert harness.agents == [new.peer]


def test_an_older_incarnation_replaces_nothing(harness: Harness) -> None:
    old, new = harness.start("d0", incarnation=1), harness.start("d0", incarnation=2)
    harness.update(new.record, completions=1)
    harness.update(old.record)
    assert harness.connections.get("d0") == new.peer
    assert harness.take_events() == [("connected", new.peer)]
    assert harness.is_quiet()


# --- failures -------------------------------------------------------------------------------------------


def test_a_failed_connection_is_tried_again_with_each_update(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    absent = record("d0", "decode")
    for _ in range(2):
        harness.update(absent, completions=1)
        assert harness.connections.get("d0") is None
        assert harness.connections.is_settled, "a broken peer does not keep this worker from being ready"
    assert "cannot connect to d0@1" in caplog.text
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    assert harness.take_events() == [("connected", d0.peer)]


def test_an_unexpected_error_is_logged_with_its_origin(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeTransport):
        def add_peer(self, record: WorkerRecord) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(RuntimeError("a bug"))
            return future

    harness = Harness(transport_type=Broken)
    harness.update(record("d0", "decode"), completions=1)
    assert harness.connections.get("d0") is None
    assert "RuntimeError: a bug" in caplog.text


def test_a_failed_write_leads_to_a_new_connection(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    d0.transport.close()
    assert not harness.own.transport.writes_reach(d0.peer)
    harness.connections.mark_failed(d0.peer)
    assert harness.connections.get("d0") is None
    harness.start("d0")
    harness.update(d0.record, completions=1)
    assert harness.connections.get("d0") == d0.peer
    assert harness.take_events() == [("connected", d0.peer)] * 2


def test_a_failed_peer_that_leaves_is_lost(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.connections.mark_failed(d0.peer)
    harness.update(completions=1)
    assert harness.take_events() == [("connected", d0.peer), ("lost", d0.peer)]


def test_a_failed_peer_that_restarted_is_lost_first(harness: Harness) -> None:
    old, new = harness.start("d0", incarnation=1), harness.start("d0", incarnation=2)
    harness.update(old.record, completions=1)
    harness.connections.mark_failed(old.peer)
    harness.update(new.record, completions=1)
    harness.update(new.record, completions=1)
    assert harness.take_events() == [("connected", old.peer), ("lost", old.peer), ("connected", new.peer)]


@pytest.mark.parametrize("peer", [Peer("unknown", 1), Peer("d0", 1), Peer("d0", 3)])
def test_the_failure_of_another_peer_changes_nothing(harness: Harness, peer: Peer) -> None:
    d0 = harness.start("d0", incarnation=2)
    harness.update(d0.record, completions=1)
    harness.connections.mark_failed(peer)
    assert harness.connections.get("d0") == d0.peer


def test_a_failure_while_connecting_changes_nothing(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.connections.update([d0.record])
    harness.connections.mark_failed(d0.peer)
    harness.pump()
    assert harness.connections.get("d0") == d0.peer


class RemovalFailsOnce(FakeTransport):
    """Its first attempt to remove a peer fails, and the peer stays."""

    has_failed = False

    def remove_peer(self, peer: Peer) -> Future[None]:
        if self.has_failed:
            return super().remove_peer(peer)
        self.has_failed = True
        future: Future[None] = Future()
        future.set_exception(TransferError("busy"))
        return future


def test_a_peer_is_not_lost_while_its_agent_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(transport_type=RemovalFailsOnce)
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.take_events()
    harness.update(completions=1)
    assert harness.events == [], "it might still write: its blocks must not be reused"
    assert "removing the agent of d0 failed" in caplog.text
    harness.update(completions=1)
    assert harness.take_events() == [("lost", d0.peer)]


def test_a_successor_waits_until_the_old_agent_is_removed() -> None:
    harness = Harness(transport_type=RemovalFailsOnce)
    old, new = harness.start("d0", incarnation=1), harness.start("d0", incarnation=2)
    harness.update(old.record, completions=1)
    harness.update(new.record, completions=1)
    assert harness.take_events() == [("connected", old.peer)]
    harness.update(new.record, completions=1)
    harness.update(new.record, completions=1)
    assert harness.take_events() == [("lost", old.peer), ("connected", new.peer)]
