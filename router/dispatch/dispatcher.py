"""Hand sequences to workers, follow them to their end, and clean up whatever happens in between.

The life of a sequence: ``dispatch`` plans it and sends ``Generate``; outputs of its current attempt are
queued for the consumer; it leaves the in-flight table with its last output, a failure, or a cancel. If its
worker is lost or unreachable, or fails in a way another one may not, it moves: it is dispatched again under
``attempt + 1`` with the tokens generated so far, and goes on after them, with the same seed. Later outputs of
the old attempt are dropped, and it is cancelled where it still runs. If its prefill worker failed, what has
landed on the decode worker counts as cached there, and another one, or the decode worker itself, computes the
rest. If no worker is there to take a sequence that has lost one, the request queue has it wait.

What is built up along a sequence's tokens has two homes. The detokenizer, stop strings and parsers live in
this router and outlive the worker. What the sampler needs (penalties; grammars, where there are any) is built
up anew by the next worker, from the tokens that ``Generate`` brings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import structs

from cluster.clock import Clock
from cluster.malformed import UNDECODABLE
from cluster.messages import Cancel, Generate, RequestError, TokenBatch, TokenOutput
from cluster.recent_keys import RecentKeys
from cluster.rpc import MessageEncodingError
from cluster.sequence_spec import RequestKey
from router.cluster_view import ClusterView, WorkerUnreachableError
from router.dispatch.in_flight import InFlightRequest, InFlightTable
from router.metrics import RouterMetrics
from router.policy.plan import NoWorkerError, Plan, Policy, RequestSnapshot

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5  # that failed


class Dispatcher:
    """Owns the in-flight table. All methods run in the event loop."""

    def __init__(self, view: ClusterView, policy: Policy, metrics: RouterMetrics, clock: Clock) -> None:
        self.in_flight = InFlightTable()
        # What becomes of a sequence that has lost its worker while no other can take it.
        self.on_no_worker: Callable[[InFlightRequest, RequestError], None] = _fail
        self._view = view
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._told_to_stop: RecentKeys[RequestKey] = RecentKeys()

    def dispatch(self, entry: InFlightRequest) -> None:
        """Plan and send; a worker that cannot be reached is excluded and the next one tried.

        A request that cannot be put into a message ends: no worker is to blame, and none would take it.
        Raises NoWorkerError.
        """
        request = entry.request
        while True:
            plan = self._policy.plan(
                self._view.state,
                RequestSnapshot(
                    model=request.model,
                    hashes=entry.hashes,
                    num_tokens=len(request.spec.prompt_token_ids) + len(entry.output_token_ids),
                    excluded_workers=entry.excluded_workers,
                    num_failed_prefills=entry.num_failed_prefills,
                    is_explained=request.is_explained,
                ),
                self._clock.unix(),
            )
            message = Generate(
                key=entry.key,
                spec=structs.replace(request.spec, output_token_ids=list(entry.output_token_ids)),
                prefill_worker=plan.prefill_worker,
            )
            try:
                self._view.send(plan.decode_worker, message)
            except WorkerUnreachableError:  # nothing was sent, so this was no attempt
                entry.excluded_workers |= {plan.decode_worker}
                continue
            except MessageEncodingError as error:
                _fail(entry, RequestError(code=UNDECODABLE, message=str(error)))
                return
            self._begin(entry, plan)
            return

    def cancel(self, entry: InFlightRequest, reason: str) -> None:
        """Stop one that has not finished, wherever it is."""
        entry.generation.unfinished.discard(entry.index)
        if entry.plan is None:  # nobody has heard of it
            return
        self._finish(entry)
        self._metrics.cancelled(reason)
        self._send_cancel(entry.plan.decode_worker, entry.key, reason)

    def on_tokens(self, worker: str, batch: TokenBatch) -> None:
        """Take one engine step's outputs from ``worker``."""
        for output in batch.outputs:
            entry = self.in_flight.get(output.key.request_id)
            if entry is None:
                self._drop(worker, output, "finished_request")
            elif output.key != entry.key:
                self._drop(worker, output, "old_attempt")
            elif entry.plan is None or entry.plan.decode_worker != worker:
                self._drop(worker, output, "wrong_worker")
            else:
                self._take(entry, output)

    def on_worker_lost(self, worker: str) -> None:
        """Move what was running on a worker that left or is unreachable."""
        for entry in self.in_flight.on_worker(worker):
            self._send_cancel(worker, entry.key, "moved")  # should it come back
            self._retry(
                entry,
                RequestError(
                    code="worker_lost",
                    message=f"The worker {worker} that served this request was lost. Please retry.",
                    retryable=True,
                ),
            )

    def _drop(self, worker: str, output: TokenOutput, reason: str) -> None:
        """Ignore an output that nobody waits for. A worker that does not know that is told, once."""
        self._metrics.message_dropped(reason)
        if output.finish_reason is None and output.key not in self._told_to_stop:
            self._send_cancel(worker, output.key, reason)

    def _take(self, entry: InFlightRequest, output: TokenOutput) -> None:
        if output.error is not None or output.finish_reason in ("error", "abort"):
            error = output.error or RequestError(
                code="aborted", message="The worker stopped this request. Please retry.", retryable=True
            )
            if error.retryable:
                self._retry(entry, error)
            else:
                self._finish(entry)
                _fail(entry, error)
            return
        if output.token_ids and (output.timings is not None or not entry.output_token_ids):
            self._prefill_done(entry)
        if output.timings is not None and entry.output_token_ids:
            # It was moved. What the client is told of the first token is how it really came.
            output = structs.replace(output, timings=None)
        entry.output_token_ids.extend(output.token_ids)
        if entry.lost_at:
            self._metrics.recovered(entry.lost_for, self._clock.unix() - entry.lost_at)
            entry.lost_at = 0.0
        if output.finish_reason is not None:
            self._finish(entry)
        entry.generation.push(entry.index, output)

    def _retry(self, entry: InFlightRequest, error: RequestError) -> None:
        """Move to another worker if an attempt is left; otherwise fail with ``error``."""
        assert entry.plan is not None
        self._finish(entry)
        entry.num_failures += error.code != "draining"  # which is no fault, and ends when routers know of it
        if entry.num_failures >= MAX_ATTEMPTS:
            _fail(entry, error)
            return
        entry.excluded_workers |= {error.worker or entry.plan.decode_worker}
        entry.num_failed_prefills += error.code == "prefill_failed"
        entry.attempt += 1
        if not entry.lost_at:
            entry.lost_at, entry.lost_for = self._clock.unix(), error.code
        self._metrics.redispatched(error.code, is_migration=bool(entry.output_token_ids))
        logger.info(
            "request %s: attempt %d after %s, with %d tokens generated",
            entry.request_id,
            entry.attempt,
            error.code,
            len(entry.output_token_ids),
        )
        try:
            self.dispatch(entry)
        except NoWorkerError:
            self.on_no_worker(entry, error)

    def _begin(self, entry: InFlightRequest, plan: Plan) -> None:
        entry.plan = plan
        entry.generation.plans[entry.index] = plan
        self.in_flight.add(entry)
        decode = self._view.state.get(plan.decode_worker)
        if decode is not None:
            decode.add_request(entry.key)
        computing = self._view.state.get(plan.prefill_worker or plan.decode_worker)
        if computing is not None:
            computing.add_prefill(entry.key, plan.uncached_tokens)
        logger.debug(
            "request %s attempt %d: decode on %s, prefill on %s, %d of %d tokens cached: %s",
            entry.request_id,
            entry.attempt,
            plan.decode_worker,
            plan.prefill_worker or plan.decode_worker,
            plan.cached_tokens,
            len(entry.request.spec.prompt_token_ids),
            plan.reason,
        )
        self._metrics.planned(plan)
        self._metrics.in_flight.set(len(self.in_flight))

    def _prefill_done(self, entry: InFlightRequest) -> None:
        assert entry.plan is not None
        computing = self._view.state.get(entry.plan.prefill_worker or entry.plan.decode_worker)
        if computing is not None:
            computing.remove_prefill(entry.key)

    def _finish(self, entry: InFlightRequest) -> None:
        """Take the entry out of the table and out of the workers' counts."""
        assert entry.plan is not None
        self._prefill_done(entry)
        decode = self._view.state.get(entry.plan.decode_worker)
        if decode is not None:
            decode.remove_request(entry.key)
        self.in_flight.remove(entry)
        self._metrics.in_flight.set(len(self.in_flight))

    def _send_cancel(self, worker: str, key: RequestKey, reason: str) -> None:
        try:
            self._view.send(worker, Cancel(key=key, reason=reason))
        except WorkerUnreachableError:  # should it be back, its next output brings another try
            logger.info("request %s: cannot cancel on %s, its deadline will", key, worker)
        else:
            self._told_to_stop.add(key)


def _fail(entry: InFlightRequest, error: RequestError) -> None:
    entry.generation.fail(entry.index, entry.key, error)
