"""The prompts a prefill worker has in hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.members import Peer
from cluster.messages import Prefill, RequestError
from cluster.sequence_spec import RequestKey
from engine.step_result import SequenceOutput


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRequest:
    """One prompt being computed for a decode worker. Times are monotonic seconds; 0 means not yet.

    Blocks are counted from the prompt's start; the decode worker wants those from ``message.first_block`` on.
    How far the handoff has come, and whether it is being fenced, is in the ledger.
    """

    message: Prefill
    peer: Peer
    engine_id: str
    received_at: float
    checked_blocks: frozenset[int]  # whose checksums go with the seal
    scheduled_at: float = 0.0
    sampled_at: float = 0.0
    num_computed_here: int = 0  # prompt tokens that were not in this worker's prefix cache
    next_block: int = 0  # first block not pushed yet
    landed_early: dict[int, int] = field(default_factory=dict)  # start → end of writes that overtook others
    operations_in_flight: int = 0  # writes and checksums under way: they read this worker's blocks
    checksums: dict[int, int] = field(default_factory=dict)  # by block
    output: SequenceOutput | None = None  # the first token
    error: RequestError | None = None  # why it was fenced, unless the decode worker asked for it
    transfer_descriptors: int = 0
    transfer_busy_ms: float = 0.0

    def landed_to(self, before: int, start: int, end: int) -> int:
        """The block up to which all have landed, once ``start`` to ``end - 1`` have; until then: ``before``.

        Writes may land in another order than they were made in.
        """
        self.landed_early[start] = end
        while (landed_to := self.landed_early.pop(before, None)) is not None:
            before = landed_to
        return before


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconnectedPrefill:
    """A prompt whose decode worker is not connected here yet."""

    message: Prefill
    sender: str
    incarnation: int
    received_at: float


def engine_id(decode_worker: str, key: RequestKey) -> str:
    """The engine's id for one attempt of a decode worker's request; no other role's ids look like it."""
    return f"prefill/{decode_worker}/{key}"
