"""Where the time to a request's first token went, told from both workers' notes."""

from __future__ import annotations

from cluster.messages import RequestTimings
from decode_worker.request_table import DecodeRequest


def request_timings(
    request: DecodeRequest, *, now: float, num_cached_tokens: int, worker_id: str
) -> RequestTimings:
    """Where the time to the first token went; ``now`` is when that token left the engine.

    ``num_cached_tokens`` is the engine's prefix hit, for a prompt that was computed here.
    """
    num_prompt_tokens = request.request.spec.num_tokens
    if request.sealed is None:
        return RequestTimings(
            queue_ms=_ms(request.received_at, request.scheduled_at),
            prefill_ms=_ms(request.scheduled_at, now),
            num_computed_tokens=num_prompt_tokens - num_cached_tokens,
            num_decode_cached_tokens=num_cached_tokens,
            decode_worker=worker_id,
        )
    writer = request.sealed.timings
    remote_ms = _ms(request.reserved_at, request.sealed_at)
    num_hit_tokens = num_prompt_tokens - writer.num_computed_tokens
    num_decode_cached = min(request.num_reserved_cached_tokens, num_hit_tokens)
    return RequestTimings(
        queue_ms=_ms(request.received_at, request.reserved_at),
        prefill_queue_ms=max(0.0, remote_ms - writer.prefill_ms - writer.transfer_ms),
        prefill_ms=writer.prefill_ms,
        transfer_ms=writer.transfer_ms,
        activate_ms=_ms(request.sealed_at, now),
        transfer_busy_ms=writer.transfer_busy_ms,
        transfer_bytes=writer.transfer_bytes,
        transfer_descriptors=writer.transfer_descriptors,
        num_computed_tokens=writer.num_computed_tokens,
        num_prefill_cached_tokens=num_hit_tokens - num_decode_cached,
        num_decode_cached_tokens=num_decode_cached,
        prefill_worker=writer.prefill_worker,
        decode_worker=worker_id,
    )


def _ms(start: float, end: float) -> float:
    return max(0.0, end - start) * 1000
