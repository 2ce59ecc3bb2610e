"""What a prefill worker tells decode workers about their prompts."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.malformed import UNDECODABLE, MalformedMessage
from cluster.messages import (
    HandoffFenced,
    HandoffLanding,
    HandoffProgress,
    RequestError,
    RequestTimings,
    Sealed,
)
from engine.step_result import SequenceOutput
from kv_transfer.transport import Peer
from prefill_worker.prefill_request import PrefillRequest, UnconnectedPrefill


def progress(request: PrefillRequest) -> HandoffProgress:
    """How far one prompt's blocks have landed."""
    return HandoffProgress(handoffs=[_landing(request)])


def heartbeats(
    requests: Iterable[PrefillRequest], unconnected: Iterable[UnconnectedPrefill]
) -> dict[str, HandoffProgress]:
    """By decode worker: all its prompts that are in hand here and not being stopped."""
    by_worker: dict[str, list[HandoffLanding]] = {}
    for request in requests:
        if not request.is_fencing:
            by_worker.setdefault(request.peer.worker_id, []).append(_landing(request))
    for one in unconnected:
        landing = HandoffLanding(
            key=one.message.key,
            num_landed_blocks=0,
            num_bytes=0,
        )
        by_worker.setdefault(one.sender, []).append(landing)
    return {worker: HandoffProgress(handoffs=handoffs) for worker, handoffs in by_worker.items()}


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


def sealed(request: PrefillRequest, output: SequenceOutput, own: Peer, now: float) -> Sealed:
    """All blocks have landed at ``now`` (monotonic seconds), and ``output`` is the first token."""
    message = request.message
    return Sealed(
        key=message.key,
        incarnation=own.incarnation,
        token_id=output.token_ids[0],
        logprobs=None if output.logprobs is None else output.logprobs[0],
        timings=RequestTimings(
            prefill_ms=(request.sampled_at - request.scheduled_at) * 1000,
            transfer_ms=(now - request.sampled_at) * 1000,
            transfer_busy_ms=request.transfer_busy_ms,
            transfer_bytes=request.transfer_bytes,
            transfer_descriptors=request.transfer_descriptors,
            num_computed_tokens=request.num_computed_here,
            prefill_worker=own.worker_id,
        ),
        checksums=[
            (block - message.first_block, checksum) for block, checksum in sorted(request.checksums.items())
        ],
    )


def _landing(request: PrefillRequest) -> HandoffLanding:
    return HandoffLanding(
        key=request.message.key,
        num_landed_blocks=request.num_landed_blocks,
        num_bytes=request.transfer_bytes,
    )
