"""The table of one worker's live handoffs: who may still write into which blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.members import Peer
from cluster.sequence_spec import RequestKey
from kv_transfer.handoff import (
    Handoff,
    HandoffEvent,
    HandoffState,
    HandoffStateError,
    advance,
)


class HandoffLedger:
    """Live handoffs by ``RequestKey``. Keeps no clock and does no I/O; one thread uses it.

    It refuses a handoff whose blocks another live handoff's writer may still write. So the prefill worker
    applies SEAL before it sends the seal: once the decode worker sees it, the blocks may be promised again.
    """

    def __init__(self, on_closed: Callable[[Handoff], None] = lambda handoff: None) -> None:
        """``on_closed`` gets each handoff that has ended, for metrics."""
        self._on_closed = on_closed
        self._live: dict[RequestKey, Handoff] = {}
        self._of_peer: dict[Peer, set[RequestKey]] = {}
        self._writable: dict[tuple[Peer, int], RequestKey] = {}  # (decode worker, block id)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(list(self._live.values()))

    def open(
        self,
        *,
        key: RequestKey,
        prefill: Peer,
        decode: Peer,
        block_ids: tuple[int, ...],
        now: float,
        deadline: float = 0.0,
        lease_expires_at: float = 0.0,
    ) -> Handoff:
        """Add a handoff in state RESERVED. Times are unix seconds; 0: no deadline, no lease.

        Raises ``HandoffStateError`` if that attempt is live already or a block is still another handoff's,
        and ``ValueError`` if a block is named twice.
        """
        if key in self._live:
            raise HandoffStateError(f"handoff {key} is open already, in state {self._live[key].state.value}")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"handoff {key} names a block twice: {block_ids}")
        for block_id in block_ids:
            holder = self._writable.get((decode, block_id))
            if holder is not None:
                raise HandoffStateError(
                    f"block {block_id} of {decode.worker_id} cannot go to handoff {key}: handoff {holder} is "
                    f"{self._live[holder].state.value} and its writer may still write it"
                )
        handoff = Handoff(
            key=key,
            prefill=prefill,
            decode=decode,
            block_ids=tuple(block_ids),
            opened_at=now,
            changed_at=now,
            deadline=deadline,
            lease_expires_at=lease_expires_at,
        )
        self._live[key] = handoff
        for peer in (prefill, decode):
            self._of_peer.setdefault(peer, set()).add(key)
        for block_id in block_ids:
            self._writable[decode, block_id] = key
        return handoff

    def transition(
        self,
        key: RequestKey,
        event: HandoffEvent,
        now: float,
        *,
        num_landed_blocks: int = 0,
        num_bytes: int = 0,
    ) -> Handoff:
        """Apply ``event`` and return the handoff's new state; the other arguments as ``advance`` says.

        Raises ``HandoffStateError`` if there is no such live handoff or the event is not legal in its state,
        and what ``advance`` raises; the ledger is then unchanged.
        """
        before = self._require(key)
        after = advance(before, event, now, num_landed_blocks=num_landed_blocks, num_bytes=num_bytes)
        self._live[after.key] = after
        # Blocks only ever stop being writable: a seal and a landing are final.
        num_no_longer = len(before.writable_block_ids) - len(after.writable_block_ids)
        for block_id in before.writable_block_ids[:num_no_longer]:
            del self._writable[after.decode, block_id]
        return after

    def renew_lease(self, key: RequestKey, expires_at: float) -> None:
        """The writer was heard of. Raises ``HandoffStateError`` if there is no such live handoff."""
        handoff = self._require(key)
        self._live[handoff.key] = replace(handoff, lease_expires_at=expires_at)

    def close(self, key: RequestKey) -> Handoff:
        """Remove a RELEASED handoff. Raises ``HandoffStateError`` for any other."""
        handoff = self._require(key)
        if handoff.outcome is None:
            raise HandoffStateError(
                f"handoff {key} is {handoff.state.value}: only a released handoff can be closed"
            )
        del self._live[handoff.key]
        for peer in {handoff.prefill, handoff.decode}:
            keys = self._of_peer[peer]
            keys.discard(handoff.key)
            if not keys:
                del self._of_peer[peer]
        self._on_closed(handoff)
        return handoff

    def get(self, key: RequestKey) -> Handoff | None:
        """The live handoff of that attempt; None if there is none."""
        return self._live.get(key)

    def with_peer(self, peer: Peer) -> tuple[Handoff, ...]:
        """Live handoffs that this incarnation of a worker takes part in, on either side, oldest first."""
        return self._oldest_first([self._live[key] for key in self._of_peer.get(peer, ())])

    def past_deadline(self, now: float) -> tuple[Handoff, ...]:
        """Live handoffs that should be fenced because their deadline has passed, oldest first."""
        return self._oldest_first([one for one in self._live.values() if one.is_past_deadline(now)])

    def lease_expired(self, now: float) -> tuple[Handoff, ...]:
        """Live handoffs that should be fenced because their writer is silent, oldest first."""
        return self._oldest_first([one for one in self._live.values() if one.is_lease_expired(now)])

    def counts(self) -> dict[HandoffState, int]:
        """Live handoffs by state, every state included."""
        counts = dict.fromkeys(HandoffState, 0)
        for handoff in self._live.values():
            counts[handoff.state] += 1
        return counts

    def check_invariants(self) -> None:
        """Assert that the indexes agree with the table. For tests."""
        writable = [
            ((handoff.decode, block_id), handoff.key)
            for handoff in self._live.values()
            for block_id in handoff.writable_block_ids
        ]
        assert len(writable) == len(self._writable), "a block has two writers"
        assert dict(writable) == self._writable
        by_peer: dict[Peer, set[RequestKey]] = {}
        for handoff in self._live.values():
            for peer in (handoff.prefill, handoff.decode):
                by_peer.setdefault(peer, set()).add(handoff.key)
        assert by_peer == self._of_peer
        for key, handoff in self._live.items():
            assert handoff.key == key
            assert (handoff.outcome is None) == (handoff.state is not HandoffState.RELEASED)

    def _require(self, key: RequestKey) -> Handoff:
        handoff = self.get(key)
        if handoff is None:
            raise HandoffStateError(f"there is no live handoff {key}")
        return handoff

    @staticmethod
    def _oldest_first(handoffs: list[Handoff]) -> tuple[Handoff, ...]:
        return tuple(sorted(handoffs, key=lambda handoff: (handoff.opened_at, handoff.key)))
