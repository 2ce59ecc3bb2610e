"""A decode worker: takes prompts from routers, has them prefilled, generates, and streams the tokens back."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict

import msgspec

from cluster.malformed import UNDECODABLE, MalformedMessage
from cluster.members import Peer, WorkerRecord
from cluster.messages import (
    Cancel,
    Generate,
    HandoffFenced,
    HandoffProgress,
    Message,
    RequestError,
    RequestTimings,
    Sealed,
    TokenBatch,
    TokenOutput,
)
from cluster.problem_log import ProblemLog
from cluster.recent_keys import RecentKeys
from cluster.sequence_spec import RequestKey
from decode_worker.prefill_links import PrefillLinks
from decode_worker.remote_prefills import PrefillEndings, PrefillFailure, RemotePrefills
from decode_worker.request_table import DecodeRequest, RequestTable
from decode_worker.request_timings import request_timings
from engine.new_request import NewRequest
from engine.scheduler.errors import DoesNotFitError, is_refusal
from engine.step_result import Reservation, SequenceOutput, StepResult
from kv_transfer.handoff_ledger import HandoffLedger
from worker_runtime.events import WorkerEvents
from worker_runtime.runtime import WorkerRuntime

logger = logging.getLogger(__name__)


class DecodeWorker:
    """A worker's decode role. Every method runs in its event loop; the engine runs in its own thread.

    A request ends when its last token or error was sent, when its router cancels it or is lost, or at its
    deadline. Whatever still can write into its blocks is then fenced before they are used again. If its
    prefill worker fails, it ends with an error on which the router plans the rest anew.
    """

    def __init__(self, runtime: WorkerRuntime, events: WorkerEvents) -> None:
        self._runtime = runtime
        self._events = events
        self._own = runtime.own
        self._engine = runtime.engine
        self._clock = runtime.clock
        self._problems = ProblemLog(logger, runtime.clock)
        self._requests = RequestTable()
        self._over: RecentKeys[RequestKey] = RecentKeys()
        self._is_draining = False
        self._links = PrefillLinks(
            runtime.network, on_message=self._on_link_message, on_unreachable=self._on_link_broken
        )
        self._remote_prefills = RemotePrefills(
            runtime,
            events,
            self._links,
            PrefillEndings(
                on_sealed=self._activate, on_failed=self._prefill_failed, on_corrupt=self._prefill_here
            ),
        )

    @property
    def ledger(self) -> HandoffLedger:
        """Handoffs into this worker's blocks."""
        return self._remote_prefills.ledger

    @property
    def num_active(self) -> int:
        """Requests in hand and handoffs not yet fenced."""
        return len(self._requests) + len(self.ledger)

    def drain(self) -> None:
        """Refuse new requests from now on; those in hand go on."""
        self._is_draining = True

    def resume(self) -> None:
        """Take new requests again."""
        self._is_draining = False

    def abandon(self, reason: str) -> None:
        """End what is in hand with an error on which the routers move it to other workers."""
        for request in self._requests:
            self._cancel(request, reason)
            message = f"worker {self._own.worker_id} ends: {reason}"
            self._fail(request, RequestError(code="draining", message=message, retryable=True))

    def on_message(self, sender: str, incarnation: int, message: Message) -> None:
        """A router's message, or a prefill worker's answer."""
        if isinstance(message, Generate):
            self._generate(sender, incarnation, message)
        elif isinstance(message, Cancel):
            request = self._requests.get(message.key.request_id)
            if request is not None and request.key.attempt <= message.key.attempt:
                self._cancel(request, message.reason)
            else:  # over, or not here yet: then it shall not start
                self._over.add(message.key)
        elif isinstance(message, HandoffProgress):
            self._remote_prefills.on_progress(Peer(sender, incarnation), message)
        elif isinstance(message, HandoffFenced):
            self._remote_prefills.on_fenced(Peer(sender, incarnation), message)
        else:
            self._events.dropped("unexpected")
            text = "dropped a %s from %s: not for a decode worker"
            self._problems.report(("unexpected", sender), text, type(message).__name__, sender)

    def on_malformed(self, router: str, incarnation: int, message: MalformedMessage) -> None:
        """A router's message that cannot be read; if it is a request, its router is told that it ended."""
        if message.kind != "generate" or message.key in self._over:
            return
        self._over.add(message.key)
        self._events.failed(UNDECODABLE)
        error = RequestError(
            code=UNDECODABLE,
            message=f"worker {self._own.worker_id} cannot read the request: {message.reason}",
        )
        failure = TokenOutput(key=message.key, finish_reason="error", error=error)
        self._runtime.send(router, TokenBatch(outputs=[failure]))

    def on_notification(self, payload: bytes) -> None:
        """A prefill worker's seal, which travels behind the data."""
        try:
            sealed = msgspec.msgpack.decode(payload, type=Sealed)
        except msgspec.DecodeError as error:
            self._events.dropped("malformed")
            self._problems.report("malformed", "dropped a malformed notification: %s", error)
            return
        self._remote_prefills.on_sealed(sealed)

    def on_peer_connected(self, peer: Peer, record: WorkerRecord) -> None:
        """It can be asked for prompts now."""
        self._links.add(peer, record)

    def on_peer_lost(self, peer: Peer) -> None:
        """A worker is gone and its agent is removed here: it cannot write any more."""
        self._links.remove(peer)
        self._remote_prefills.on_peer_lost(peer)

    def on_router_lost(self, router: str, incarnation: int) -> None:
        """Nobody waits for this router's requests any more."""
        for request in self._requests:
            if request.router == router and request.router_incarnation <= incarnation:
                self._cancel(request, "router lost")

    def on_tick(self) -> None:
        """Once per report interval: deadlines, and writers that do not answer."""
        now = self._clock.unix()
        for request in self._requests:
            if 0 < request.request.spec.deadline <= now:
                self._cancel(request, "deadline")
                self._fail(
                    request,
                    RequestError(
                        code="deadline_exceeded", message="the request's deadline passed before it finished"
                    ),
                )
        self._remote_prefills.on_tick()

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
            if not self._runtime.send(router, TokenBatch(outputs=outputs)):
                self.on_router_lost(router, incarnation)

    def close(self) -> None:
        """Disconnect from all prefill workers."""
        self._links.close_all()

    def _on_link_message(self, peer: Peer, message: Message) -> None:
        self.on_message(peer.worker_id, peer.incarnation, message)

    def _on_link_broken(self, peer: Peer) -> None:
        self._remote_prefills.on_unreachable(peer)

    def _generate(self, router: str, incarnation: int, message: Generate) -> None:
        known = self._requests.get(message.key.request_id)
        if message.key in self._over:
            self._events.dropped("over")
            return
        if known is not None:
            if known.key.attempt >= message.key.attempt:
                self._events.dropped("old_attempt")
                return
            self._cancel(known, "superseded")
        request = DecodeRequest(
            request=message,
            router=router,
            router_incarnation=incarnation,
            received_at=self._clock.monotonic(),
            prefill_peer=self._links.get(message.prefill_worker) if message.prefill_worker else None,
        )
        if self._is_draining:
            self._fail(
                request,
                RequestError(
                    code="draining",
                    message=f"worker {self._own.worker_id} takes no new requests",
                    retryable=True,
                ),
            )
            return
        self._requests.add(request)
        new_request = NewRequest(
            request_id=request.engine_id,
            spec=message.spec,
            remote_prefill=request.prefill_peer is not None,
        )
        now = request.received_at
        self._engine.run(
            lambda engine: engine.add_request(new_request, now),
            on_error=functools.partial(self._refused, request),
        )

    def _refused(self, request: DecodeRequest, error: BaseException) -> None:
        code = "invalid_request" if is_refusal(error) else "worker_overloaded"
        if isinstance(error, DoesNotFitError):
            code = "context_length_exceeded"  # here; another worker's cache may be larger
        self._fail(request, RequestError(code=code, message=str(error), retryable=not is_refusal(error)))

    def _handoff_broke(
        self, request: DecodeRequest, error: BaseException, *, may_still_write: bool = False
    ) -> None:
        """The engine does not take what the writer left behind: give the blocks back."""
        self._engine.run(lambda engine: engine.abort(request.engine_id, quarantine=may_still_write))
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
            self._remote_prefills.start(request, reservation)
            return
        assert request.request.prefill_worker is not None
        self._prefill_failed(
            PrefillFailure(
                key=request.key,
                worker=request.request.prefill_worker,
                reason=f"{request.request.prefill_worker} is gone",
                num_landed_tokens=reservation.num_cached_tokens,
                may_still_write=False,
            )
        )

    def _activate(self, sealed: Sealed) -> None:
        request = self._requests.get(sealed.key.request_id)
        assert request is not None, sealed.key  # a cancelled request's handoff is fencing
        request.sealed = sealed
        request.sealed_at = self._clock.monotonic()
        self._engine.run(
            lambda engine: engine.activate(request.engine_id, sealed.token_id, sealed.logprobs),
            on_error=functools.partial(self._handoff_broke, request),
        )

    def _prefill_failed(self, failure: PrefillFailure) -> None:
        """End the attempt; what has landed stays in the prefix cache, and the router plans the rest."""
        request = self._requests.get(failure.key.request_id)
        if request is None or request.key != failure.key:
            return
        logger.warning(
            "prefill of %s failed with %d tokens landed: %s",
            failure.key,
            failure.num_landed_tokens,
            failure.reason,
        )
        refusal = failure.refusal
        request.error = RequestError(
            code="prefill_failed" if refusal is None else refusal.code,
            message=failure.reason,
            retryable=refusal is None,
            worker=failure.worker,
        )
        self._engine.run(
            lambda engine: engine.give_up_remote(
                request.engine_id,
                failure.num_landed_tokens,
                failure.reason,
                quarantine=failure.may_still_write,
            ),
            on_error=functools.partial(self._handoff_broke, request, may_still_write=failure.may_still_write),
        )

    def _prefill_here(self, key: RequestKey) -> None:
        """What landed is not what was sent: do not trust that path again for this request."""
        self._events.corrupt()
        request = self._requests.get(key.request_id)
        assert request is not None, key  # a cancelled request's handoff is not verified
        request.prefill_peer = None
        num_cached = request.num_reserved_cached_tokens
        self._engine.run(
            lambda engine: engine.fail_remote(request.engine_id, num_cached),
            on_error=functools.partial(self._handoff_broke, request),
        )

    def _cancel(self, request: DecodeRequest, reason: str) -> None:
        self._end(request)
        quarantine = self._remote_prefills.cancel(request.key, reason)
        self._engine.run(lambda engine: engine.abort(request.engine_id, quarantine=quarantine))

    def _token_output(self, request: DecodeRequest, output: SequenceOutput) -> TokenOutput:
        timings: RequestTimings | None = None
        if output.token_ids and not request.first_token_sent:
            request.first_token_sent = True
            timings = request_timings(
                request,
                now=self._clock.monotonic(),
                num_cached_tokens=output.num_cached_tokens,
                worker_id=self._own.worker_id,
            )
            self._events.first_token(timings)
        error: RequestError | None = None
        if output.finish_reason is not None:
            self._end(request)
            if output.error is not None:
                error = request.error
                code = "invalid_request" if output.is_refusal else "engine_error"
                error = error or RequestError(
                    code=code, message=output.error, retryable=not output.is_refusal
                )
                self._events.failed(error.code)
        return TokenOutput(
            key=request.key,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=error,
            timings=timings,
        )

    def _end(self, request: DecodeRequest) -> None:
        self._requests.remove(request)
        self._over.add(request.key)

    def _fail(self, request: DecodeRequest, error: RequestError) -> None:
        self._end(request)
        self._events.failed(error.code)
        failure = TokenOutput(
            key=request.key,
            finish_reason="error",
            error=error,
        )
        self._runtime.send(request.router, TokenBatch(outputs=[failure]))
