"""The requests a decode worker has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.members import Peer
from cluster.messages import Generate, RequestError, Sealed
from cluster.sequence_spec import RequestKey


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRequest:
    """One attempt of one sequence, from the router's ``Generate`` to its last token.

    Times are monotonic seconds; 0 means not yet.
    """

    request: Generate
    router: str
    router_incarnation: int
    received_at: float
    prefill_peer: Peer | None  # None: prefilled here, or the one that was asked for is gone
    reserved_at: float = 0.0
    sealed_at: float = 0.0
    scheduled_at: float = 0.0  # first computed here
    num_reserved_cached_tokens: int = 0  # of the prompt, in this worker's cache when blocks were reserved
    sealed: Sealed | None = None
    error: RequestError | None = None  # why the engine was told to end it
    first_token_sent: bool = False

    @property
    def key(self) -> RequestKey:
        """Which attempt of which sequence this is."""
        return self.request.key

    @property
    def engine_id(self) -> str:
        """The request's id inside the engine: another attempt is another sequence."""
        return engine_id(self.key)


def engine_id(key: RequestKey) -> str:
    """The engine's id for one attempt of a router's request; no other role's ids look like it."""
    return f"decode/{key}"


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
        request_id = request.key.request_id
        assert request_id not in self._by_request_id, request_id
        self._by_request_id[request_id] = request
        self._by_engine_id[request.engine_id] = request

    def remove(self, request: DecodeRequest) -> None:
        """Drop a request; harmless if it is not there."""
        if self._by_engine_id.pop(request.engine_id, None) is request:
            del self._by_request_id[request.key.request_id]

    def get(self, request_id: str) -> DecodeRequest | None:
        """The attempt in hand of a request."""
        return self._by_request_id.get(request_id)

    def by_engine_id(self, engine_id: str) -> DecodeRequest | None:
        """The request of a sequence in the engine; None if it was cancelled meanwhile."""
        return self._by_engine_id.get(engine_id)
