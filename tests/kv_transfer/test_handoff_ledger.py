"""The ledger under random events: its indexes agree, and a writable block has one handoff."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.members import Peer
from cluster.sequence_spec import RequestKey
from kv_transfer.handoff import Handoff, HandoffEvent, HandoffOutcome, HandoffStateError, legal_events
from kv_transfer.handoff_ledger import HandoffLedger

WRITERS = [Peer("p0", 1), Peer("p0", 2), Peer("p1", 1)]
OWN = Peer("d0", 1)


def open_handoff(
    ledger: HandoffLedger, name: str, blocks: tuple[int, ...], writer: Peer = WRITERS[0]
) -> None:
    ledger.open(key=RequestKey(name, 1), prefill=writer, decode=OWN, block_ids=blocks, now=0.0, deadline=5.0)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = HandoffLedger()
        self.count = 0

    @rule(blocks=st.sets(st.integers(0, 9), max_size=4), writer=st.sampled_from(WRITERS))
    def open(self, blocks: set[int], writer: Peer) -> None:
        writable = {block for one in self.ledger for block in one.writable_block_ids}
        name = f"r{self.count}"
        self.count += 1
        if blocks & writable:
            with pytest.raises(HandoffStateError, match="may still write"):
                open_handoff(self.ledger, name, tuple(blocks), writer)
        else:
            open_handoff(self.ledger, name, tuple(blocks), writer)

    @precondition(lambda self: len(self.ledger))
    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.ledger)))
        event = data.draw(st.sampled_from(sorted(HandoffEvent, key=lambda event: event.value)))
        if event in legal_events(one.state):
            num_landed = data.draw(st.integers(0, len(one.block_ids)))
            after = self.ledger.transition(one.key, event, 1.0, num_landed_blocks=num_landed)
            if after.outcome is not None:
                self.ledger.close(one.key)
        else:
            with pytest.raises(HandoffStateError):
                self.ledger.transition(one.key, event, 1.0)
            assert self.ledger.get(one.key) == one

    @invariant()
    def consistent(self) -> None:
        self.ledger.check_invariants()
        assert sum(self.ledger.counts().values()) == len(self.ledger)
        for writer in WRITERS:
            assert set(self.ledger.with_peer(writer)) == {one for one in self.ledger if one.prefill == writer}


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def test_only_released_handoffs_are_closed_and_counted() -> None:
    closed: list[Handoff] = []
    ledger = HandoffLedger(on_closed=closed.append)
    open_handoff(ledger, "r", (1, 2))
    with pytest.raises(HandoffStateError, match="only a released"):
        ledger.close(RequestKey("r", 1))
    ledger.transition(RequestKey("r", 1), HandoffEvent.FENCE, 1.0)
    ledger.transition(RequestKey("r", 1), HandoffEvent.WRITER_GONE, 2.0)
    ledger.close(RequestKey("r", 1))
    assert len(ledger) == 0
    assert [(one.outcome, one.fenced_at, one.changed_at) for one in closed] == [
        (HandoffOutcome.WRITER_GONE, 1.0, 2.0)
    ]


def test_the_same_attempt_and_a_block_named_twice_are_refused() -> None:
    ledger = HandoffLedger()
    open_handoff(ledger, "r", (1,))
    with pytest.raises(HandoffStateError, match="open already"):
        open_handoff(ledger, "r", (2,))
    with pytest.raises(ValueError, match="names a block twice"):
        open_handoff(ledger, "s", (3, 3))


def test_a_sealed_handoff_that_is_fenced_later_does_not_disturb_the_blocks_next_writer() -> None:
    ledger = HandoffLedger()
    open_handoff(ledger, "first", (1, 2))
    ledger.transition(RequestKey("first", 1), HandoffEvent.STREAM, 1.0)
    ledger.transition(RequestKey("first", 1), HandoffEvent.SEAL, 2.0)
    open_handoff(ledger, "second", (2, 3))
    ledger.transition(RequestKey("first", 1), HandoffEvent.FENCE, 3.0)
    ledger.check_invariants()
    ledger.transition(RequestKey("first", 1), HandoffEvent.FENCED, 4.0)
    ledger.close(RequestKey("first", 1))
    ledger.check_invariants()
    with pytest.raises(HandoffStateError, match="block 2 of d0 cannot go to handoff third"):
        open_handoff(ledger, "third", (1, 2))


def test_handoffs_of_a_peer_are_found_by_incarnation_on_either_side() -> None:
    ledger = HandoffLedger()
    open_handoff(ledger, "r", (1,), WRITERS[0])
    open_handoff(ledger, "s", (2,), WRITERS[1])
    assert [one.key.request_id for one in ledger.with_peer(WRITERS[0])] == ["r"]
    assert [one.key.request_id for one in ledger.with_peer(WRITERS[1])] == ["s"]
    assert [one.key.request_id for one in ledger.with_peer(OWN)] == ["r", "s"]
    assert ledger.with_peer(Peer("p0", 3)) == ()


def test_an_unknown_handoff_is_named() -> None:
    ledger = HandoffLedger()
    assert ledger.get(RequestKey("r", 1)) is None
    for act in (
        lambda: ledger.close(RequestKey("r", 1)),
        lambda: ledger.transition(RequestKey("r", 1), HandoffEvent.SEAL, 1.0),
    ):
        with pytest.raises(HandoffStateError, match="no live handoff r#1"):
            act()


def test_past_deadline_is_oldest_first() -> None:
    ledger = HandoffLedger()
    for name in ("b", "a"):
        open_handoff(ledger, name, ())
    assert [one.key.request_id for one in ledger.past_deadline(5.0)] == ["a", "b"]
    assert ledger.past_deadline(4.9) == ()


def test_a_landed_block_may_be_promised_again_while_the_rest_is_still_written() -> None:
    ledger = HandoffLedger()
    open_handoff(ledger, "first", (1, 2, 3))
    ledger.transition(RequestKey("first", 1), HandoffEvent.STREAM, 1.0)
    ledger.transition(RequestKey("first", 1), HandoffEvent.LAND, 2.0, num_landed_blocks=2, num_bytes=20)
    ledger.transition(RequestKey("first", 1), HandoffEvent.FENCE, 3.0)
    ledger.transition(
        RequestKey("first", 1), HandoffEvent.LAND, 4.0, num_landed_blocks=1
    )  # an older word changes nothing
    open_handoff(ledger, "second", (1, 2))
    with pytest.raises(HandoffStateError, match="block 3 of d0 cannot go to handoff third"):
        open_handoff(ledger, "third", (3,))
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        ledger.transition(RequestKey("first", 1), HandoffEvent.LAND, 5.0, num_landed_blocks=4)
    ledger.check_invariants()


def test_a_lease_that_is_not_renewed_expires_while_the_writer_should_be_writing() -> None:
    ledger = HandoffLedger()
    for name in ("silent", "heard of", "not told yet"):
        ledger.open(
            key=RequestKey(name, 1),
            prefill=WRITERS[0],
            decode=OWN,
            block_ids=(),
            now=0.0,
            lease_expires_at=2.0,
        )
    for name in ("silent", "heard of"):
        ledger.transition(RequestKey(name, 1), HandoffEvent.STREAM, 0.0)
    ledger.renew_lease(RequestKey("heard of", 1), 3.0)
    assert ledger.lease_expired(1.9) == ()
    assert [one.key.request_id for one in ledger.lease_expired(2.0)] == ["silent"]
    with pytest.raises(HandoffStateError, match="no live handoff"):
        ledger.renew_lease(RequestKey("unknown", 1), 3.0)
