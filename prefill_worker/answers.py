"""What a prefill worker tells decode workers about their prompts."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.malformed import UNDECODABLE, MalformedMessage
from cluster.members import Peer
from cluster.messages import (
    HandoffFenced,
    HandoffLanding,
    HandoffProgress,
    RequestError,
    RequestTimings,
    Sealed,
)
from engine.step_result import SequenceOutput
from kv_transfer.handoff import Handoff, HandoffState
from prefill_worker.prefill_request import PrefillRequest, UnconnectedPrefill


def progress(handoff: Handoff) -> HandoffProgress:
    """How far one prompt's blocks have landed."""
    return HandoffProgress(handoffs=[_landing(handoff)])


def heartbeats(
    handoffs: Iterable[Handoff], unconnected: Iterable[UnconnectedPrefill]
) -> dict[str, HandoffProgress]:
    """By decode worker: all its prompts that are in hand here and not being stopped."""
    by_worker: dict[str, list[HandoffLanding]] = {}
    for handoff in handoffs:
        if handoff.state is not HandoffState.FENCING:
            by_worker.setdefault(handoff.decode.worker_id, []).append(_landing(handoff))
    for one in unconnected:
        landing = HandoffLanding(key=one.message.key, num_landed_blocks=0, num_bytes=0)
        by_worker.setdefault(one.sender, []).append(landing)
    return {worker: HandoffProgress(handoffs=landings) for worker, landings in by_worker.items()}


def refused(prefill: UnconnectedPrefill, code: str, reason: str) -> HandoffFenced:
    """This prompt is not computed here; another worker might."""
    message = prefill.message
    error = RequestError(code=code, message=reason, retryable=True)
    return HandoffFenced(key=message.key, error=error)


def undecodable(message: MalformedMessage, own: Peer) -> HandoffFenced:
    """This prompt cannot be read, and other workers would not read it either."""
    error = RequestError(
        code=UNDECODABLE, message=f"worker {own.worker_id} cannot read the prompt: {message.reason}"
    )
    return HandoffFenced(key=message.key, error=error)


def fenced(request: PrefillRequest) -> HandoffFenced:
    """Nothing of this prompt will be written any more."""
    message = request.message
    return HandoffFenced(key=message.key, error=request.error)


def sealed(request: PrefillRequest, handoff: Handoff, output: SequenceOutput, now: float) -> Sealed:
    """All blocks have landed at ``now`` (monotonic seconds), and ``output`` is the first token."""
    message = request.message
    return Sealed(
        key=message.key,
        incarnation=handoff.prefill.incarnation,
        token_id=output.token_ids[0],
        logprobs=None if output.logprobs is None else output.logprobs[0],
        timings=RequestTimings(
            prefill_ms=(request.sampled_at - request.scheduled_at) * 1000,
            transfer_ms=(now - request.sampled_at) * 1000,
            transfer_busy_ms=request.transfer_busy_ms,
            transfer_bytes=handoff.bytes_landed,
            transfer_descriptors=request.transfer_descriptors,
            num_computed_tokens=request.num_computed_here,
            prefill_worker=handoff.prefill.worker_id,
        ),
        checksums=[
            (block - message.first_block, checksum) for block, checksum in sorted(request.checksums.items())
        ],
    )


def _landing(handoff: Handoff) -> HandoffLanding:
    return HandoffLanding(
        key=handoff.key, num_landed_blocks=handoff.num_landed_blocks, num_bytes=handoff.bytes_landed
    )
