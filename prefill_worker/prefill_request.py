"""The prompts a prefill worker has in hand."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import Prefill, RequestError
from engine.step_result import SequenceOutput
from kv_transfer.transport import Peer


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRequest:
    """One prompt being computed for a decode worker. Times are monotonic seconds; 0 means not yet."""

    message: Prefill
    peer: Peer
    engine_id: str
    received_at: float
    scheduled_at: float = 0.0
    sampled_at: float = 0.0
    num_computed_here: int = 0  # prompt tokens that were not in this worker's prefix cache
    next_block: int = 0  # first block of the prompt not pushed yet
    writes_in_flight: int = 0
    output: SequenceOutput | None = None  # the first token
    is_fencing: bool = False
    error: RequestError | None = None  # why it was fenced, unless the decode worker asked for it
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    transfer_busy_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconnectedPrefill:
    """A prompt whose decode worker is not connected here yet."""

    message: Prefill
    sender: str
    incarnation: int
    received_at: float


def engine_id(decode_worker: str, request_id: str, attempt: int) -> str:
    """The engine's id for one attempt of a decode worker's request."""
    return f"{decode_worker}/{request_id}#{attempt}"
