"""One KV handoff as both of its workers see it: states, events, and which event is legal in which state.

    RESERVED ──▶ STREAMING ──▶ SEALED ──▶ ACTIVE ──▶ RELEASED
        │            │            │                     ▲
        └────────────┴────────────┴──▶ FENCING ─────────┘

RESERVED: the decode worker holds blocks, the prefill worker does not know them yet.
STREAMING: the prefill worker knows the blocks and may write into them.
SEALED: every block has landed and the prefill worker will not write again.
ACTIVE: the sequence runs in the decode worker; for the prefill worker: the seal is delivered.
FENCING: called off, but the prefill worker may still write. The blocks are in quarantine.
RELEASED: the blocks belong to nobody's handoff any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from cluster.members import Peer
from cluster.sequence_spec import RequestKey


class HandoffState(Enum):
    """Where a handoff stands. See the module's text."""

    RESERVED = "reserved"
    STREAMING = "streaming"
    SEALED = "sealed"
    ACTIVE = "active"
    FENCING = "fencing"
    RELEASED = "released"


class HandoffEvent(Enum):
    """What moves a handoff on."""

    STREAM = "stream"  # the prefill worker is told the blocks, or has accepted them
    LAND = "land"  # blocks have landed; the state stays
    SEAL = "seal"  # the prefill worker has written everything; sent only after the last write landed
    ACTIVATE = "activate"
    RELEASE = "release"
    FENCE = "fence"  # cancel, deadline, or an error: stop, but the writer may not know yet
    FENCED = "fenced"  # the writer says it has stopped
    WRITER_GONE = "writer_gone"  # the writer's incarnation is dead and its agent removed


class HandoffOutcome(Enum):
    """How a handoff ended: by which proof its blocks were known to be safe."""

    COMPLETED = "completed"
    FENCED = "fenced"
    WRITER_GONE = "writer_gone"


class HandoffStateError(Exception):
    """An event came that is not legal in the handoff's state, or a ledger was asked the impossible."""


class _Step(NamedTuple):
    state: HandoffState
    outcome: HandoffOutcome | None = None


_S, _E, _O = HandoffState, HandoffEvent, HandoffOutcome

# A seal that crosses a fence is as good as a confirmation: the writer has finished.
_STEPS: Mapping[tuple[HandoffState, HandoffEvent], _Step] = MappingProxyType(
    {
        (_S.RESERVED, _E.STREAM): _Step(_S.STREAMING),
        (_S.RESERVED, _E.FENCE): _Step(_S.FENCING),
        (_S.STREAMING, _E.LAND): _Step(_S.STREAMING),
        (_S.STREAMING, _E.SEAL): _Step(_S.SEALED),
        (_S.STREAMING, _E.FENCE): _Step(_S.FENCING),
        (_S.SEALED, _E.ACTIVATE): _Step(_S.ACTIVE),
        (_S.SEALED, _E.FENCE): _Step(_S.FENCING),
        (_S.ACTIVE, _E.RELEASE): _Step(_S.RELEASED, _O.COMPLETED),
        (_S.FENCING, _E.LAND): _Step(_S.FENCING),
        (_S.FENCING, _E.SEAL): _Step(_S.RELEASED, _O.FENCED),
        (_S.FENCING, _E.FENCED): _Step(_S.RELEASED, _O.FENCED),
        (_S.FENCING, _E.WRITER_GONE): _Step(_S.RELEASED, _O.WRITER_GONE),
    }
)

WRITABLE_STATES = frozenset({_S.RESERVED, _S.STREAMING, _S.FENCING})  # the writer may write, unless it sealed
FENCEABLE_STATES = frozenset({_S.RESERVED, _S.STREAMING, _S.SEALED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One handoff at one moment. Times are unix seconds and come from the caller."""

    key: RequestKey
    prefill: Peer  # the writer
    decode: Peer  # whose blocks these are
    block_ids: tuple[int, ...]  # in the decode worker's cache
    opened_at: float
    deadline: float = 0.0  # 0: none
    lease_expires_at: float = 0.0  # unless the writer is heard of before; 0: no lease
    state: HandoffState = HandoffState.RESERVED
    changed_at: float = 0.0  # when ``state`` was entered
    num_landed_blocks: int = 0  # leading ones of ``block_ids``: written once, never again
    bytes_landed: int = 0
    is_sealed: bool = False  # the writer has written everything, whatever happened since
    fenced_at: float = 0.0  # when FENCING was entered, if it was
    outcome: HandoffOutcome | None = None  # set with RELEASED

    @property
    def is_writable(self) -> bool:
        """Whether the writer may write into the blocks, now or soon."""
        return self.state in WRITABLE_STATES and not self.is_sealed

    @property
    def writable_block_ids(self) -> tuple[int, ...]:
        """The blocks that the writer may write, now or soon."""
        return self.block_ids[self.num_landed_blocks :] if self.is_writable else ()

    def is_past_deadline(self, now: float) -> bool:
        """Whether it should be fenced: its deadline has passed before the sequence became active."""
        return 0 < self.deadline <= now and self.state in FENCEABLE_STATES

    def is_lease_expired(self, now: float) -> bool:
        """Whether it should be fenced because the writer, who should be writing, was not heard of."""
        return 0 < self.lease_expires_at <= now and self.state is HandoffState.STREAMING


def legal_events(state: HandoffState) -> frozenset[HandoffEvent]:
    """The events that ``advance`` accepts in ``state``."""
    return frozenset(event for from_state, event in _STEPS if from_state is state)


def advance(
    handoff: Handoff,
    event: HandoffEvent,
    now: float,
    *,
    num_landed_blocks: int = 0,
    num_bytes: int = 0,
) -> Handoff:
    """The handoff after ``event`` at time ``now``.

    ``num_landed_blocks`` and ``num_bytes`` belong to LAND: how many leading blocks have landed by now, and
    the bytes since the last LAND. Raises ``HandoffStateError`` if the event is not legal in the handoff's
    state, ``ValueError`` for negative ``num_bytes`` or more blocks than there are.
    """
    if num_bytes < 0:
        raise ValueError(f"num_bytes must not be negative, got {num_bytes}")
    if not 0 <= num_landed_blocks <= len(handoff.block_ids):
        raise ValueError(
            f"num_landed_blocks must be from 0 to {len(handoff.block_ids)}, got {num_landed_blocks}"
        )
    step = _STEPS.get((handoff.state, event))
    if step is None:
        legal = ", ".join(sorted(legal.value for legal in legal_events(handoff.state))) or "none"
        raise HandoffStateError(
            f"handoff {handoff.key} is {handoff.state.value}: event {event.value} is not legal, only: {legal}"
        )
    return replace(
        handoff,
        state=step.state,
        changed_at=handoff.changed_at if step.state is handoff.state else now,
        num_landed_blocks=max(
            handoff.num_landed_blocks, num_landed_blocks if event is HandoffEvent.LAND else 0
        ),
        bytes_landed=handoff.bytes_landed + (num_bytes if event is HandoffEvent.LAND else 0),
        is_sealed=handoff.is_sealed or event is HandoffEvent.SEAL,
        fenced_at=now if event is HandoffEvent.FENCE else handoff.fenced_at,
        outcome=step.outcome,
    )
