"""A decode worker: takes prompts from routers, has them prefilled, generates, and streams the tokens back."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable

from cluster.clock import Clock
from cluster.messages import (
    Cancel,
    Generate,
    HandoffFenced,
    Message,
    RequestError,
    RequestTimings,
    Sealed,
    TokenBatch,
    TokenOutput,
)
from cluster.recent_keys import RecentKeys
from decode_worker.prefill_links import PrefillLinks
from decode_worker.remote_prefills import RemotePrefillActions, RemotePrefills
from decode_worker.request_table import DecodeRequest, RequestTable
from decode_worker.request_timings import request_timings
from engine.engine_commands import EngineCommands
from engine.step_result import NewRequest, Reservation, SequenceOutput, StepResult
from kv_transfer.transport import Peer, Transport

logger = logging.getLogger(__name__)


class DecodeWorker:
    """The decode role. Every method runs in the worker's event loop; the engine runs in its own thread.

    A request ends when its last token or error was sent, when its router cancels it or is lost, or at its
    deadline. Whatever still can write into its blocks is then fenced before they are used again.
    """

    def __init__(
        self,
        *,
        own: Peer,
        block_size: int,
        engine: EngineCommands,
        transport: Transport,
        links: PrefillLinks,
        clock: Clock,
        send: Callable[[str, Message], bool],
        on_first_token: Callable[[RequestTimings], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """``send(router, message)`` is False if the router is gone.

        ``on_first_token`` and ``on_failed`` (with an error's code) are for metrics.
        """
        self._own = own
        self._engine = engine
        self._links = links
        self._clock = clock
        self._send = send
        self._on_first_token = on_first_token
        self._on_failed = on_failed
        self._requests = RequestTable()
        self._over: RecentKeys[tuple[str, int]] = RecentKeys()  # (request id, attempt)
        self._is_draining = False
        self.remote_prefills = RemotePrefills(
            own=own,
            block_size=block_size,
            transport=transport,
            clock=clock,
            actions=RemotePrefillActions(
                send=links.send,
                on_sealed=self._activate,
                on_failed=self._prefill_here,
                release_quarantined=lambda engine_id: self._engine.run(
                    lambda engine: engine.release_quarantined(engine_id)
                ),
            ),
        )

    @property
    def num_active(self) -> int:
        """Requests in hand and handoffs not yet fenced."""
        return len(self._requests) + len(self.remote_prefills.ledger)

    def drain(self) -> None:
        """Refuse new requests from now on; those in hand go on."""
        self._is_draining = True

    def on_message(self, peer: str, incarnation: int, message: Message) -> None:
        """A router's message."""
        if isinstance(message, Generate):
            self._generate(peer, incarnation, message)
        elif isinstance(message, Cancel):
            request = self._requests.get(message.request_id)
            if request is not None and request.request.attempt <= message.attempt:
                self._cancel(request, message.reason)
            else:  # over, or not here yet: then it shall not start
                self._over.add((message.request_id, message.attempt))
        else:
            logger.warning("dropped a %s from %s: not for a decode worker", type(message).__name__, peer)

    def on_prefill_worker_message(self, peer: Peer, message: Message) -> None:
        """A prefill worker's answer."""
        if isinstance(message, HandoffFenced):
            self.remote_prefills.on_fenced(peer, message)
        else:
            logger.warning("dropped a %s from prefill worker %s", type(message).__name__, peer.worker_id)

    def on_router_lost(self, router: str, incarnation: int) -> None:
        """Nobody waits for this router's requests any more."""
        for request in self._requests:
            if request.router == router and request.router_incarnation <= incarnation:
                self._cancel(request, "router lost")

    def on_tick(self) -> None:
        """Once per report interval: deadlines, and writers that do not answer."""
        now = self._clock.unix()
        for request in self._requests:
            if 0 < request.request.deadline <= now:
                self._cancel(request, "deadline")
                self._fail(
                    request,
                    RequestError(
                        code="deadline_exceeded", message="the request's deadline passed before it finished"
                    ),
                )
        self.remote_prefills.repeat_unanswered()

    def on_step(self, result: StepResult) -> None:
        """What one engine step did."""
        for engine_id in result.first_scheduled:
            request = self._requests.by_engine_id(engine_id)
            if request is not None and not request.scheduled_at:
                request.scheduled_at = result.started_at
        for reservation in result.reservations:
            self._reserved(reservation)
        batches: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
        for output in result.outputs:
            request = self._requests.by_engine_id(output.request_id)
            if request is not None:
                batches[request.router, request.router_incarnation].append(
                    self._token_output(request, output)
                )
        for (router, incarnation), outputs in batches.items():
            if not self._send(router, TokenBatch(outputs=outputs)):
                self.on_router_lost(router, incarnation)

    def _generate(self, router: str, incarnation: int, message: Generate) -> None:
        known = self._requests.get(message.request_id)
        if (message.request_id, message.attempt) in self._over:
            return  # it came late or twice
        if known is not None:
            if known.request.attempt >= message.attempt:
                return  # a duplicate, or older than what runs
            self._cancel(known, "superseded")
        # Tokens of an earlier attempt are part of what must be computed: only the engine here knows how.
        wants_peer = message.prefill_worker if not message.output_token_ids else None
        request = DecodeRequest(
            request=message,
            router=router,
            router_incarnation=incarnation,
            received_at=self._clock.monotonic(),
            prefill_peer=self._links.get(wants_peer) if wants_peer is not None else None,
        )
        if self._is_draining:
            self._fail(
                request,
                RequestError(code="draining", message=f"worker {self._own.worker_id} drains", retryable=True),
            )
            return
        self._requests.add(request)
        new_request = NewRequest(
            request_id=request.engine_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            output_token_ids=message.output_token_ids,
            remote_prefill=request.prefill_peer is not None,
            cache_salt=message.cache_salt,
        )
        now = request.received_at
        self._engine.run(
            lambda engine: engine.add_request(new_request, now),
            on_error=functools.partial(self._refused, request),
        )

    def _refused(self, request: DecodeRequest, error: BaseException) -> None:
        code = "invalid_request" if isinstance(error, ValueError) else "worker_overloaded"
        self._fail(request, RequestError(code=code, message=str(error), retryable=code != "invalid_request"))

    def _handoff_broke(self, request: DecodeRequest, error: BaseException) -> None:
        """The engine does not take what the writer, which has stopped, left behind: give the blocks back."""
        self._engine.run(lambda engine: engine.abort(request.engine_id))
        self._fail(request, RequestError(code="handoff_failed", message=str(error), retryable=True))

    def _reserved(self, reservation: Reservation) -> None:
        request = self._requests.by_engine_id(reservation.request_id)
        if request is None:
            return  # cancelled meanwhile; nobody was told of the blocks
        request.reserved_at = self._clock.monotonic()
        request.num_reserved_cached_tokens = reservation.num_cached_tokens
        if (
            request.prefill_peer is not None
            and self._links.get(request.prefill_peer.worker_id) == request.prefill_peer
        ):
            self.remote_prefills.start(request, reservation)
        else:
            self._prefill_here(
                request.request.request_id, request.request.attempt, "the prefill worker is gone"
            )

    def _activate(self, sealed: Sealed) -> None:
        request = self._requests.get(sealed.request_id)
        assert request is not None, sealed.request_id  # a cancelled request's handoff is fencing
        request.sealed = sealed
        request.sealed_at = self._clock.monotonic()
        self._engine.run(
            lambda engine: engine.activate(request.engine_id, sealed.token_id, sealed.logprobs),
            on_error=functools.partial(self._handoff_broke, request),
        )

    def _prefill_here(self, request_id: str, attempt: int, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.request.attempt != attempt:
            return
        logger.warning("request %s is prefilled here: %s", request_id, reason)
        request.prefill_peer = None
        self._engine.run(
            lambda engine: engine.fail_remote(request.engine_id),
            on_error=functools.partial(self._handoff_broke, request),
        )

    def _cancel(self, request: DecodeRequest, reason: str) -> None:
        self._end(request)
        quarantine = self.remote_prefills.cancel(request.request.request_id, request.request.attempt, reason)
        self._engine.run(lambda engine: engine.abort(request.engine_id, quarantine=quarantine))

    def _token_output(self, request: DecodeRequest, output: SequenceOutput) -> TokenOutput:
        timings: RequestTimings | None = None
        if not request.first_token_sent:
            request.first_token_sent = True
            timings = request_timings(
                request,
                now=self._clock.monotonic(),
                num_cached_tokens=output.num_cached_tokens,
                worker_id=self._own.worker_id,
            )
            self._on_first_token(timings)
        error: RequestError | None = None
        if output.finish_reason is not None:
            self._end(request)
            if output.error is not None:
                error = RequestError(code="engine_error", message=output.error, retryable=True)
                self._on_failed(error.code)
        return TokenOutput(
            request_id=request.request.request_id,
            attempt=request.request.attempt,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=error,
            timings=timings,
        )

    def _end(self, request: DecodeRequest) -> None:
        self._requests.remove(request)
        self._over.add((request.request.request_id, request.request.attempt))

    def _fail(self, request: DecodeRequest, error: RequestError) -> None:
        self._end(request)
        self._on_failed(error.code)
        failure = TokenOutput(
            request_id=request.request.request_id,
            attempt=request.request.attempt,
            finish_reason="error",
            error=error,
        )
        self._send(request.router, TokenBatch(outputs=[failure]))
