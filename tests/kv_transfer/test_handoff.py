"""The handoff's state machine, exhaustively: every event in every state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.members import Peer
from cluster.sequence_spec import RequestKey
from kv_transfer.handoff import (
    FENCEABLE_STATES,
    WRITABLE_STATES,
    Handoff,
    HandoffEvent,
    HandoffOutcome,
    HandoffState,
    HandoffStateError,
    advance,
    legal_events,
)

S, E = HandoffState, HandoffEvent
LEGAL = {
    S.RESERVED: {E.STREAM: S.STREAMING, E.FENCE: S.FENCING},
    S.STREAMING: {E.LAND: S.STREAMING, E.SEAL: S.SEALED, E.FENCE: S.FENCING},
    S.SEALED: {E.ACTIVATE: S.ACTIVE, E.FENCE: S.FENCING},
    S.ACTIVE: {E.RELEASE: S.RELEASED},
    S.FENCING: {E.LAND: S.FENCING, E.SEAL: S.RELEASED, E.FENCED: S.RELEASED, E.WRITER_GONE: S.RELEASED},
    S.RELEASED: {},
}


def handoff(state: HandoffState) -> Handoff:
    return Handoff(
        key=RequestKey("r", 1),
        prefill=Peer("p", 1),
        decode=Peer("d", 1),
        block_ids=(1, 2),
        opened_at=0.0,
        deadline=10.0,
        state=state,
    )


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_event_in_every_state(state: HandoffState, event: HandoffEvent) -> None:
    if event in LEGAL[state]:
        assert event in legal_events(state)
        assert advance(handoff(state), event, 1.0).state is LEGAL[state][event]
    else:
        assert event not in legal_events(state)
        with pytest.raises(HandoffStateError, match=f"is {state.value}: event {event.value}"):
            advance(handoff(state), event, 1.0)


def test_blocks_are_released_only_by_a_proof_that_the_writer_has_stopped() -> None:
    for state in WRITABLE_STATES:
        for event, after in LEGAL[state].items():
            if after is S.RELEASED:
                assert event in (E.SEAL, E.FENCED, E.WRITER_GONE)


@given(st.lists(st.sampled_from(HandoffEvent), max_size=12))
def test_any_series_of_events(events: list[HandoffEvent]) -> None:
    """Illegal ones change nothing; it ends once, by a proof, and is never writable again after a seal."""
    one, seen = handoff(S.RESERVED), []
    for time, event in enumerate(events):
        before = one
        try:
            one = advance(one, event, float(time))
        except HandoffStateError:
            assert event not in LEGAL[before.state]
            continue
        seen.append(event)
        assert one.key == before.key
        assert one.block_ids == before.block_ids
        assert before.is_writable or not one.is_writable
        if one.state is S.RELEASED:
            assert {E.SEAL, E.FENCED, E.WRITER_GONE} & set(seen), "nothing proves that the writer has stopped"
            assert not legal_events(one.state)
        assert (one.outcome is not None) == (one.state is S.RELEASED)
        assert one.is_sealed == (E.SEAL in seen)


def test_outcomes_and_bytes() -> None:
    streaming = advance(handoff(S.STREAMING), E.LAND, 1.0, num_bytes=5)
    fencing = advance(advance(streaming, E.LAND, 2.0, num_bytes=7), E.FENCE, 3.0)
    assert (fencing.bytes_landed, fencing.changed_at) == (12, 3.0)
    assert advance(fencing, E.FENCED, 4.0).outcome is HandoffOutcome.FENCED
    assert advance(fencing, E.WRITER_GONE, 4.0).outcome is HandoffOutcome.WRITER_GONE
    assert advance(handoff(S.ACTIVE), E.RELEASE, 4.0).outcome is HandoffOutcome.COMPLETED
    with pytest.raises(ValueError, match="negative"):
        advance(streaming, E.LAND, 1.0, num_bytes=-1)


@pytest.mark.parametrize("state", S)
def test_a_deadline_counts_until_the_sequence_runs(state: HandoffState) -> None:
    assert handoff(state).is_past_deadline(10.0) == (state in FENCEABLE_STATES)
    assert not handoff(state).is_past_deadline(9.9)
