"""The requests this router has handed to workers and not yet finished."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.messages import RequestError, TokenOutput
from cluster.sequence_spec import RequestKey, SequenceSpec
from router.policy.plan import Plan
from router.state.prompt_hashes import PromptHashes


@dataclass(frozen=True, kw_only=True)
class SequenceRequest:
    """One prompt that needs one answer: a choice of an API request."""

    request_id: str
    model: str
    spec: SequenceSpec
    hashes: PromptHashes | None = None  # of the prompt, where they have been computed
    is_explained: bool = False  # whether its plans shall list their candidates


@dataclass(kw_only=True, eq=False)
class InFlightRequest:
    """The ledger entry of one sequence. Holds all that a re-dispatch to another worker needs."""

    request: SequenceRequest
    index: int  # among its generation's sequences
    generation: Generation
    hashes: PromptHashes
    attempt: int = 0
    plan: Plan | None = None
    excluded_workers: frozenset[str] = frozenset()
    num_failures: int = 0
    num_failed_prefills: int = 0
    lost_at: float = 0.0  # unix seconds: when it lost its worker; 0 while it has one that answers
    lost_for: str = ""  # the error's code
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """What its attempts have in common."""
        return self.request.request_id

    @property
    def key(self) -> RequestKey:
        """The identity that its present attempt has on every worker."""
        return RequestKey(self.request.request_id, self.attempt)


class Generation:
    """The answers to one API request, as they arrive: a wake-up and a list of outputs per choice.

    Outputs wait here while the client is slow; their number is bounded by the sequences' ``max_tokens``.
    """

    def __init__(self, num_sequences: int) -> None:
        self.plans: list[Plan | None] = [None] * num_sequences
        self.entries: list[InFlightRequest] = []  # by choice
        self.unfinished: set[int] = set(range(num_sequences))
        self._pending: list[tuple[int, TokenOutput]] = []
        self._wake = asyncio.Event()
        self._disconnected = False
        self._is_nudged = False

    @property
    def is_disconnected(self) -> bool:
        """Whether the client went away."""
        return self._disconnected

    def push(self, index: int, output: TokenOutput) -> None:
        """Queue one output of choice ``index`` for the consumer."""
        self._pending.append((index, output))
        if output.finish_reason is not None or output.error is not None:
            self.unfinished.discard(index)
        self._wake.set()

    def fail(self, index: int, key: RequestKey, error: RequestError) -> None:
        """Queue a failure that the router itself detected."""
        self.push(
            index,
            TokenOutput(key=key, finish_reason="error", error=error),
        )

    def disconnect(self) -> None:
        """Wake the consumer because nobody waits for the answer any more."""
        self._disconnected = True
        self._wake.set()

    def nudge(self) -> None:
        """Have ``next`` return an empty list, at once or when it is called."""
        self._is_nudged = True
        self._wake.set()

    async def next(self) -> list[tuple[int, TokenOutput]]:
        """Everything that arrived since the last call, waiting for something.

        Empty if the client went away, or after a ``nudge``.
        """
        while not self._pending and not self._disconnected and not self._is_nudged:
            self._wake.clear()
            await self._wake.wait()
        if self._disconnected or self._is_nudged:
            self._is_nudged = False
            return []
        pending, self._pending = self._pending, []
        return pending


class InFlightTable:
    """Ledger entries by request id."""

    def __init__(self) -> None:
        self._entries: dict[str, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(tuple(self._entries.values()))

    def add(self, entry: InFlightRequest) -> None:
        """Insert a new entry. Its request id must be new."""
        assert entry.request_id not in self._entries, entry.request_id
        self._entries[entry.request_id] = entry

    def get(self, request_id: str) -> InFlightRequest | None:
        """The entry, or None if it has finished."""
        return self._entries.get(request_id)

    def remove(self, entry: InFlightRequest) -> None:
        """Drop an entry; dropping it twice is harmless."""
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]

    def on_worker(self, worker: str) -> list[InFlightRequest]:
        """The entries whose decode worker is ``worker``."""
        return [
            entry
            for entry in self._entries.values()
            if entry.plan is not None and entry.plan.decode_worker == worker
        ]
