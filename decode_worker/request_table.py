"""The requests a decode worker has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.messages import Generate, RequestTimings, Sealed
from kv_transfer.transport import Peer


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRequest:
    """One attempt of one sequence, from the router's ``Generate`` to its last token.

    Times are monotonic seconds; 0 means not yet.
    """

    request: Generate
    router: str
    router_incarnation: int
    received_at: float
    prefill_peer: Peer | None  # None: prefilled here
    reserved_at: float = 0.0
    sealed_at: float = 0.0
    scheduled_at: float = 0.0  # first computed here
    num_reserved_cached_tokens: int = 0  # of the prompt, in this worker's cache when blocks were reserved
    sealed: Sealed | None = None
    first_token_sent: bool = False

    @property
    def engine_id(self) -> str:
        """The request's id inside the engine: another attempt is another sequence."""
        return engine_id(self.request.request_id, self.request.attempt)


def engine_id(request_id: str, attempt: int) -> str:
    """The engine's id for one attempt of a request."""
    return f"{request_id}#{attempt}"


@dataclass(slots=True)
class RequestTable:
    """Requests by request id, at most one attempt of each, and by engine id."""

    _by_request_id: dict[str, DecodeRequest] = field(default_factory=dict)
    _by_engine_id: dict[str, DecodeRequest] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_request_id)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._by_request_id.values()))

    def add(self, request: DecodeRequest) -> None:
        """Insert a request whose id is not in the table."""
        request_id = request.request.request_id
        assert request_id not in self._by_request_id, request_id
        self._by_request_id[request_id] = request
        self._by_engine_id[request.engine_id] = request

    def remove(self, request: DecodeRequest) -> None:
        """Drop a request; harmless if it is not there."""
        if self._by_engine_id.pop(request.engine_id, None) is request:
            del self._by_request_id[request.request.request_id]

    def get(self, request_id: str) -> DecodeRequest | None:
        """The attempt in hand of a request."""
        return self._by_request_id.get(request_id)

    def by_engine_id(self, engine_id: str) -> DecodeRequest | None:
        """The request of a sequence in the engine; None if it was cancelled meanwhile."""
        return self._by_engine_id.get(engine_id)


def request_timings(
    request: DecodeRequest, *, now: float, num_cached_tokens: int, worker_id: str
) -> RequestTimings:
    """Where the time to the first token went; ``now`` is when that token left the engine.

    ``num_cached_tokens`` is the engine's prefix hit, for a prompt that was computed here.
    """
    num_prompt_tokens = len(request.request.prompt_token_ids)
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
