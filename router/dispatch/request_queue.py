"""Requests between the API and the workers: places, waiting for one or for a worker, deadlines.

A request waits in three ways, all of them bounded and all of them here: with its body still being read, as
one of ``num_requests``; for places, in the order of priority and arrival; and for a worker, when the one that
served it was lost and no other is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from cluster.clock import Clock, StartTimer, Timer, call_later
from cluster.messages import RequestError
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.in_flight import Generation, InFlightRequest, SequenceRequest
from router.dispatch.waiting_line import LineFullError, Ticket, WaitingLine
from router.metrics import RouterMetrics
from router.policy.plan import NoWorkerError
from router.state.prompt_hashes import PromptHashes

RECOVERY_WAIT_S = 30.0  # how long a request whose worker was lost waits for another: a restart takes seconds
_RECOVERY_POLL_S = 0.2


@dataclass(kw_only=True, eq=False)
class _Active:
    """A generation that has not been closed."""

    ticket: Ticket
    joined_at: float  # unix seconds
    deadline: Timer
    patience: Timer | None = None  # while it waits for places


@dataclass(kw_only=True, eq=False)
class _Parked:
    """A sequence that waits for a worker."""

    error: RequestError  # what its client is told if none comes
    give_up_at: float  # unix seconds
    timer: Timer


class RequestQueue:
    """Owns the generations from their start to their close. All methods run in the event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        max_sequences: int,
        max_waiting: int,
        max_wait_ms: float,
        timer: StartTimer = call_later,
    ) -> None:
        """Takes over what ``dispatcher`` cannot place again."""
        self.num_requests = 0  # of the API, at any stage
        self.line = WaitingLine(max_sequences, max_waiting)
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._max_wait_s = max_wait_ms / 1000
        self._timer = timer
        self._active: dict[Generation, _Active] = {}
        self._waiting: dict[Ticket, Generation] = {}
        self._parked: dict[InFlightRequest, _Parked] = {}
        dispatcher.on_no_worker = self._park

    def enter(self) -> None:
        """A request arrives, before its body is read. Raises LineFullError; else it must ``exit``."""
        if self.num_requests >= self.line.max_sequences + self.line.max_waiting:
            self._metrics.refused.inc()
            raise LineFullError(self.line.max_sequences, self.line.max_waiting)
        self.num_requests += 1

    def exit(self) -> None:
        """A request has been answered."""
        self.num_requests -= 1

    def start(self, requests: Sequence[SequenceRequest], timeout_ms: float) -> Generation:
        """Dispatch the sequences of one API request, or have them wait. The caller must ``close`` it.

        Raises LineFullError, NeverFitsError, and NoWorkerError if one of them cannot be placed now; with
        nothing left behind.
        """
        now = self._clock.unix()
        generation = Generation(len(requests))
        generation.entries = _entries(requests, generation, deadline=now + timeout_ms / 1000)
        ticket = Ticket(num_sequences=len(requests), priority=requests[0].spec.priority)
        try:
            has_places = self.line.join(ticket)
        except LineFullError:
            self._metrics.refused.inc()
            raise
        self._active[generation] = active = _Active(
            ticket=ticket,
            joined_at=now,
            deadline=self._timer(timeout_ms / 1000, lambda: self._expire(generation, timeout_ms)),
        )
        if has_places:
            try:
                self._dispatch(generation)
            except NoWorkerError:
                self.close(generation, "no_worker")
                raise
        else:
            self._waiting[ticket] = generation
            active.patience = self._timer(self._max_wait_s, lambda: self._give_up(generation))
            self._metrics.requests_waiting.set(self.line.num_waiting)
        return generation

    def cancel(self, generation: Generation, index: int, reason: str) -> None:
        """Stop one sequence, for example because its text reached a stop string."""
        if index in generation.unfinished:
            self._cancel(generation.entries[index], reason)

    def close(self, generation: Generation, reason: str) -> None:
        """Cancel what is still running and give its places to the next. Harmless if it is closed."""
        active = self._active.pop(generation, None)
        if active is None:
            return
        active.deadline.cancel()
        if active.patience is not None:
            active.patience.cancel()
        self._waiting.pop(active.ticket, None)
        for entry in generation.entries:
            if entry.index in generation.unfinished:
                self._cancel(entry, reason)
        self._admit(self.line.leave(active.ticket))

    def close_all(self, reason: str) -> None:
        """Cancel everything (at shutdown)."""
        error = RequestError(code="shutting_down", message="The router is shutting down.", retryable=True)
        for generation in list(self._active):
            self._fail_all(generation, error, reason)

    def _dispatch(self, generation: Generation) -> None:
        self._metrics.request_wait_time.observe(self._clock.unix() - self._active[generation].joined_at)
        for entry in generation.entries:
            self._dispatcher.dispatch(entry)

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            generation = self._waiting.pop(ticket)
            patience = self._active[generation].patience
            assert patience is not None
            patience.cancel()
            try:
                self._dispatch(generation)
            except NoWorkerError as error:
                message = RequestError(code="no_worker_available", message=str(error), retryable=True)
                self._fail_all(generation, message, "no_worker")
        self._metrics.requests_waiting.set(self.line.num_waiting)

    def _give_up(self, generation: Generation) -> None:
        """It has waited for places long enough."""
        message = (
            f"No place was free within {self._max_wait_s:g} s: this router serves at most "
            f"{self.line.max_sequences} sequences at a time. Please retry later."
        )
        self._metrics.refused.inc()
        self._fail_all(generation, RequestError(code="queue_timeout", message=message), "queue_timeout")

    def _expire(self, generation: Generation, timeout_ms: float) -> None:
        message = f"The request did not finish within its timeout of {timeout_ms:.0f} ms."
        self._fail_all(generation, RequestError(code="timeout", message=message), "timeout")

    def _fail_all(self, generation: Generation, error: RequestError, reason: str) -> None:
        ticket = self._active[generation].ticket
        if self._waiting.pop(ticket, None) is not None:
            self._admit(self.line.leave(ticket))
        for entry in generation.entries:
            if entry.index in generation.unfinished:
                self._cancel(entry, reason)
                generation.fail(entry.index, entry.key, error)

    def _cancel(self, entry: InFlightRequest, reason: str) -> None:
        parked = self._parked.pop(entry, None)
        if parked is not None:
            parked.timer.cancel()
        self._dispatcher.cancel(entry, reason)

    def _park(self, entry: InFlightRequest, error: RequestError) -> None:
        """Try again soon, on any worker: the one that was lost may have been started again."""
        self._wait_for_worker(entry, error, self._clock.unix() + RECOVERY_WAIT_S)

    def _wait_for_worker(self, entry: InFlightRequest, error: RequestError, give_up_at: float) -> None:
        if self._clock.unix() >= give_up_at:
            entry.generation.fail(entry.index, entry.key, error)
            return
        entry.excluded_workers = frozenset()
        timer = self._timer(_RECOVERY_POLL_S, lambda: self._try_again(entry))
        self._parked[entry] = _Parked(error=error, give_up_at=give_up_at, timer=timer)

    def _try_again(self, entry: InFlightRequest) -> None:
        parked = self._parked.pop(entry)
        try:
            self._dispatcher.dispatch(entry)
        except NoWorkerError:
            self._wait_for_worker(entry, parked.error, parked.give_up_at)


def _entries(
    requests: Sequence[SequenceRequest], generation: Generation, deadline: float
) -> list[InFlightRequest]:
    entries: list[InFlightRequest] = []
    for index, request in enumerate(requests):
        hashes = request.hashes
        if hashes is None and entries and _prompt_of(request) is _prompt_of(entries[-1].request):
            hashes = entries[-1].hashes
        if hashes is None:
            hashes = PromptHashes(_prompt_of(request), request.spec.cache_salt)
        request = replace(request, spec=structs.replace(request.spec, deadline=deadline))
        entries.append(InFlightRequest(request=request, index=index, generation=generation, hashes=hashes))
    return entries


def _prompt_of(request: SequenceRequest) -> list[int]:
    return request.spec.prompt_token_ids
