"""The table of one worker's live handoffs: who may still write into which blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.handoff import (
    Handoff,
    HandoffEvent,
    HandoffKey,
    HandoffOutcome,
    HandoffState,
    HandoffStateError,
    advance,
)
from kv_transfer.transport import Peer


class HandoffLedger:
    """Live handoffs by ``(request_id, attempt)``. Keeps no clock and does no I/O; one thread uses it.

    It refuses a handoff whose blocks another live handoff's writer may still write. So the prefill worker
    applies SEAL before it sends the seal: once the decode worker sees it, the blocks may be promised again.
    """

    def __init__(self) -> None:
        self._live: dict[HandoffKey, Handoff] = {}
        self._of_peer: dict[Peer, set[HandoffKey]] = {}
        self._writable: dict[tuple[Peer, int], HandoffKey] = {}  # (decode worker, block id)
        self._finished = dict.fromkeys(HandoffOutcome, 0)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(list(self._live.values()))

    def open(
        self,
        *,
        request_id: str,
        attempt: int,
        prefill: Peer,
        decode: Peer,
        block_ids: tuple[int, ...],
        now: float,
        deadline: float = 0.0,
    ) -> Handoff:
        """Add a handoff in state RESERVED.

        Raises ``HandoffStateError`` if that attempt is live already or a block is still another handoff's,
        and ``ValueError`` if a block is named twice.
        """
        key = HandoffKey(request_id, attempt)
        if key in self._live:
            raise HandoffStateError(
                f"handoff {request_id} attempt {attempt} is open already, in state "
                f"{self._live[key].state.value}"
            )
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"handoff {request_id} attempt {attempt} names a block twice: {block_ids}")
        for block_id in block_ids:
            holder = self._writable.get((decode, block_id))
            if holder is not None:
                raise HandoffStateError(
                    f"block {block_id} of {decode.worker_id} cannot go to handoff {request_id} attempt "
                    f"{attempt}: handoff {holder.request_id} attempt {holder.attempt} is "
                    f"{self._live[holder].state.value} and its writer may still write it"
                )
        handoff = Handoff(
            request_id=request_id,
            attempt=attempt,
            prefill=prefill,
            decode=decode,
            block_ids=tuple(block_ids),
            opened_at=now,
            changed_at=now,
            deadline=deadline,
        )
        self._live[key] = handoff
        for peer in (prefill, decode):
            self._of_peer.setdefault(peer, set()).add(key)
        for block_id in block_ids:
            self._writable[decode, block_id] = key
        return handoff

    def transition(
        self,
        request_id: str,
        attempt: int,
        event: HandoffEvent,
        now: float,
        *,
        num_bytes: int = 0,
        reason: str = "",
    ) -> Handoff:
        """Apply ``event`` and return the handoff's new state.

        Raises ``HandoffStateError`` if there is no such live handoff or the event is not legal in its state;
        the ledger is then unchanged.
        """
        before = self._require(request_id, attempt)
        after = advance(before, event, now, num_bytes=num_bytes, reason=reason)
        self._live[after.key] = after
        if before.is_writable and not after.is_writable:  # never the other way: a seal is final
            for block_id in after.block_ids:
                del self._writable[after.decode, block_id]
        return after

    def close(self, request_id: str, attempt: int) -> Handoff:
        """Remove a RELEASED handoff and count how it ended. Raises ``HandoffStateError`` for any other."""
        handoff = self._require(request_id, attempt)
        if handoff.outcome is None:
            raise HandoffStateError(
                f"handoff {request_id} attempt {attempt} is {handoff.state.value}: "
                "only a released handoff can be closed"
            )
        del self._live[handoff.key]
        for peer in {handoff.prefill, handoff.decode}:
            keys = self._of_peer[peer]
            keys.discard(handoff.key)
            if not keys:
                del self._of_peer[peer]
        self._finished[handoff.outcome] += 1
        return handoff

    def get(self, request_id: str, attempt: int) -> Handoff | None:
        """The live handoff of that attempt; None if there is none."""
        return self._live.get(HandoffKey(request_id, attempt))

    def with_peer(self, peer: Peer) -> tuple[Handoff, ...]:
        """Live handoffs that this incarnation of a worker takes part in, on either side, oldest first."""
        return self._oldest_first([self._live[key] for key in self._of_peer.get(peer, ())])

    def past_deadline(self, now: float) -> tuple[Handoff, ...]:
        """Live handoffs that should be fenced because their deadline has passed, oldest first."""
        return self._oldest_first([one for one in self._live.values() if one.is_past_deadline(now)])

    def counts(self) -> dict[HandoffState, int]:
        """Live handoffs by state, every state included."""
        counts = dict.fromkeys(HandoffState, 0)
        for handoff in self._live.values():
            counts[handoff.state] += 1
        return counts

    def finished(self) -> dict[HandoffOutcome, int]:
        """Closed handoffs since the start, by how they ended."""
        return dict(self._finished)

    @property
    def num_blocks_reserved(self) -> int:
        """Blocks promised to a writer that has not sealed yet."""
        return self._num_blocks(HandoffState.RESERVED, HandoffState.STREAMING)

    @property
    def num_blocks_quarantined(self) -> int:
        """Blocks of handoffs that were called off but whose writer has not confirmed that it stopped."""
        return self._num_blocks(HandoffState.FENCING)

    def check_invariants(self) -> None:
        """Assert that the indexes agree with the table. For tests."""
        writable = [
            ((handoff.decode, block_id), handoff.key)
            for handoff in self._live.values()
            if handoff.is_writable
            for block_id in handoff.block_ids
        ]
        assert len(writable) == len(self._writable), "a block has two writers"
        assert dict(writable) == self._writable
        by_peer: dict[Peer, set[HandoffKey]] = {}
        for handoff in self._live.values():
            for peer in (handoff.prefill, handoff.decode):
                by_peer.setdefault(peer, set()).add(handoff.key)
        assert by_peer == self._of_peer
        for key, handoff in self._live.items():
            assert handoff.key == key
            assert (handoff.outcome is None) == (handoff.state is not HandoffState.RELEASED)

    def _num_blocks(self, *states: HandoffState) -> int:
        return sum(len(handoff.block_ids) for handoff in self._live.values() if handoff.state in states)

    def _require(self, request_id: str, attempt: int) -> Handoff:
        handoff = self.get(request_id, attempt)
        if handoff is None:
            raise HandoffStateError(f"there is no live handoff {request_id} attempt {attempt}")
        return handoff

    @staticmethod
    def _oldest_first(handoffs: list[Handoff]) -> tuple[Handoff, ...]:
        return tuple(sorted(handoffs, key=lambda handoff: (handoff.opened_at, handoff.key)))
