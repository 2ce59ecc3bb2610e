"""A prefill worker: computes prompts and pushes their KV blocks into decode workers, chunk by chunk."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future

import msgspec

from cluster.malformed import UNDECODABLE, MalformedMessage
from cluster.members import Peer, WorkerRecord
from cluster.messages import CancelPrefill, HandoffFenced, Message, Prefill, RequestError, RequestTimings
from cluster.recent_keys import RecentKeys
from engine.new_request import NewRequest
from engine.scheduler.errors import is_refusal
from engine.step_result import SequenceOutput, StepResult
from kv_transfer.handoff import FENCEABLE_STATES, Handoff, HandoffEvent, HandoffState, HandoffStateError
from kv_transfer.handoff_ledger import HandoffLedger
from kv_transfer.transport import TransferStats
from prefill_worker import answers
from prefill_worker.block_pushes import BlockPushes, PushEvents
from prefill_worker.prefill_request import PrefillRequest, UnconnectedPrefill, engine_id
from worker_runtime.events import WorkerEvents
from worker_runtime.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

_CONNECT_WAIT_S = 5.0  # a decode worker that has just registered may ask before it is connected here


class PrefillWorker:
    """A worker's prefill role. Every method runs in its event loop; the engine runs in its own thread.

    Each accepted ``Prefill`` ends in exactly one answer: a seal, sent behind the data after the last write
    has landed, or ``HandoffFenced`` after the last write that was under way has ended. Until then its blocks
    here stay pinned.
    """

    def __init__(self, runtime: WorkerRuntime, events: WorkerEvents) -> None:
        """Every ``runtime.heartbeat_s`` seconds decode workers hear which of their prompts are in hand here.

        A process that stood still for more than ``runtime.max_stall_s`` seconds may have been taken for dead,
        and its target blocks given to others: it stops all its pushes before it writes again.
        """
        self._runtime = runtime
        self._events = events
        self._own = runtime.own
        self._clock = runtime.clock
        self._engine = runtime.engine
        self._last_heartbeat = self._last_seen_alive = runtime.clock.monotonic()
        self._requests: dict[str, PrefillRequest] = {}  # by engine id; each has its handoff in the ledger
        self._unconnected: list[UnconnectedPrefill] = []
        self._over: RecentKeys[str] = RecentKeys()  # engine ids of what will never be written again
        self._is_draining = False
        self.ledger = HandoffLedger(events.handoff_ended)
        self._pushes = BlockPushes(
            runtime,
            PushEvents(on_landed=self._landed, on_failed=self._write_failed, on_settled=self._settle),
        )

    @property
    def num_active(self) -> int:
        """Prompts in hand, pushes under way included."""
        return len(self._requests) + len(self._unconnected)

    def drain(self) -> None:
        """Refuse new prompts from now on; those in hand go on."""
        self._is_draining = True

    def resume(self) -> None:
        """Take new prompts again."""
        self._is_draining = False

    def abandon(self, reason: str) -> None:
        """Stop what is in hand, and say so; others will compute it."""
        message = f"worker {self._own.worker_id} ends: {reason}"
        for request in list(self._requests.values()):
            self._fail(request, "draining", message)
        waiting, self._unconnected = self._unconnected, []
        for one in waiting:
            self._refuse(one, "draining", message)

    def on_message(self, sender: str, incarnation: int, message: Message) -> None:
        """A decode worker's message."""
        self._notice_stall()
        if isinstance(message, Prefill):
            self._accept(
                UnconnectedPrefill(
                    message=message,
                    sender=sender,
                    incarnation=incarnation,
                    received_at=self._clock.monotonic(),
                )
            )
        elif isinstance(message, CancelPrefill):
            self._cancelled(sender, incarnation, message)
        else:
            self._events.dropped("unexpected")

    def on_malformed(self, sender: str, incarnation: int, message: MalformedMessage) -> None:
        """A decode worker's message that cannot be read: if it is a prompt, nothing of it will be written."""
        key = engine_id(sender, message.key)
        if message.kind == "prefill" and key not in self._requests:
            self._events.failed(UNDECODABLE)
            self._over.add(key)
            self._runtime.send(sender, answers.undecodable(message, self._own))

    def on_notification(self, payload: bytes) -> None:
        """Nobody notifies a prefill worker."""
        self._events.dropped("unexpected")

    def on_peer_connected(self, peer: Peer, record: WorkerRecord) -> None:
        """A decode worker can be written to now."""
        self._accept_unconnected()

    def on_peer_lost(self, peer: Peer) -> None:
        """A decode worker is gone and its agent is removed here: nothing is sent to it any more."""
        for request in list(self._requests.values()):
            if request.peer == peer:
                self._fence(request, f"{peer.worker_id} is gone", None)
        self._unconnected = [
            one
            for one in self._unconnected
            if (one.sender, one.incarnation) != (peer.worker_id, peer.incarnation)
        ]

    def on_router_lost(self, router: str, incarnation: int) -> None:
        """Nothing to do: prompts here belong to decode workers, and those cancel them."""

    def close(self) -> None:
        """Nothing to do: decode workers connect to this worker, and not the other way round."""

    def on_tick(self) -> None:
        """Once per report interval: deadlines, heartbeats, decode workers that could not be connected."""
        self._notice_stall()
        for handoff in self.ledger.past_deadline(self._clock.unix()):
            request = self._requests[engine_id(handoff.decode.worker_id, handoff.key)]
            self._fail(request, "deadline_exceeded", "the deadline passed during prefill")
        now = self._clock.monotonic()
        if now - self._last_heartbeat >= self._runtime.heartbeat_s:
            self._last_heartbeat = now
            self._send_heartbeats()
        self._accept_unconnected()

    def on_step(self, result: StepResult) -> None:
        """What one engine step did: push the blocks it finished, and seal the prompts it completed."""
        self._notice_stall()
        for progress in result.progress:
            request = self._requests.get(progress.request_id)
            if request is not None and not self._is_fencing(request):
                if not request.scheduled_at:
                    request.scheduled_at = result.started_at
                request.num_computed_here = request.message.spec.num_tokens - progress.num_cached_tokens
                try:
                    self._pushes.push(request, progress)
                except ValueError as error:  # block ids that the peer does not have
                    self._fail(request, "invalid_request", str(error))
        for output in result.outputs:
            request = self._requests.get(output.request_id)
            if request is None or self._is_fencing(request):
                continue
            if output.error is not None:
                code = "invalid_request" if output.is_refusal else "engine_error"
                self._fail(request, code, output.error, retryable=not output.is_refusal)
                continue
            request.output = output
            request.sampled_at = self._clock.monotonic()
            self._settle(request)

    def _notice_stall(self) -> None:
        now = self._clock.monotonic()
        stall_s, self._last_seen_alive = now - self._last_seen_alive, now
        if stall_s > self._runtime.max_stall_s and self._requests:
            reason = f"worker {self._own.worker_id} stood still for {stall_s:.1f} s"
            for request in list(self._requests.values()):
                self._fail(request, "stalled", reason)

    def _accept_unconnected(self) -> None:
        """Try again those whose decode worker was not connected."""
        waiting, self._unconnected = self._unconnected, []
        for one in waiting:
            self._accept(one)

    def _accept(self, prefill: UnconnectedPrefill) -> None:
        message = prefill.message
        key = engine_id(prefill.sender, message.key)
        if message.prefill_incarnation != self._own.incarnation:
            self._events.dropped("old_incarnation")  # the sender learns of that one's end from the registry
            return
        if key in self._requests:
            self._events.dropped("duplicate")
            return
        if key in self._over:
            self._runtime.send(prefill.sender, HandoffFenced(key=message.key))
            return
        if self._is_draining:
            self._refuse(prefill, "draining", f"worker {self._own.worker_id} takes no new prompts")
            return
        peer = self._runtime.peers.get(prefill.sender)
        if peer is None or peer.incarnation != prefill.incarnation:
            if self._clock.monotonic() - prefill.received_at < _CONNECT_WAIT_S:
                self._unconnected.append(prefill)
            else:
                reason = f"{self._own.worker_id} has no connection to {prefill.sender}"
                self._refuse(prefill, "not_connected", reason)
            return
        num_blocks = -(-message.spec.num_tokens // self._runtime.block_size)
        if message.first_block + len(message.block_ids) < num_blocks or message.first_block < 0:
            self._refuse(
                prefill,
                "invalid_request",
                f"a prompt of {message.spec.num_tokens} tokens has {num_blocks} blocks, but the target "
                f"is blocks {message.first_block} to {message.first_block + len(message.block_ids) - 1}",
            )
            return
        try:
            self.ledger.open(
                key=message.key,
                prefill=self._own,
                decode=peer,
                block_ids=tuple(message.block_ids),
                now=self._clock.unix(),
                deadline=message.spec.deadline,
            )
        except (HandoffStateError, ValueError) as error:
            self._refuse(prefill, "handoff_conflict", str(error))
            return
        checked = self._runtime.verifier.choose(message.key, num_blocks - message.first_block)
        request = PrefillRequest(
            message=message,
            peer=peer,
            engine_id=key,
            received_at=prefill.received_at,
            checked_blocks=frozenset(message.first_block + index for index in checked),
            next_block=message.first_block,
        )
        self._advance(request, HandoffEvent.STREAM)
        self._requests[request.engine_id] = request
        new_request = NewRequest(
            request_id=request.engine_id,
            spec=message.spec,
            prefill_only=True,
        )
        now = request.received_at
        self._engine.run(
            lambda engine: engine.add_request(new_request, now),
            on_error=functools.partial(self._engine_refused, request),
        )

    def _refuse(self, prefill: UnconnectedPrefill, code: str, reason: str) -> None:
        """Nothing was written and nothing will be."""
        self._events.failed(code)
        self._over.add(engine_id(prefill.sender, prefill.message.key))
        self._runtime.send(prefill.sender, answers.refused(prefill, code, reason))

    def _engine_refused(self, request: PrefillRequest, error: BaseException) -> None:
        code = "invalid_request" if is_refusal(error) else "prefill_refused"
        self._fail(request, code, str(error), retryable=not is_refusal(error))

    def _landed(self, request: PrefillRequest, start: int, end: int, stats: TransferStats) -> None:
        first_block = request.message.first_block
        landed_to = request.landed_to(first_block + self._handoff(request).num_landed_blocks, start, end)
        handoff = self._advance(
            request,
            HandoffEvent.LAND,
            num_landed_blocks=landed_to - first_block,
            num_bytes=stats.num_bytes,
        )
        # With the first token sampled the seal is next, which says it all.
        if request.output is None and handoff.state is not HandoffState.FENCING:
            self._runtime.send(request.peer.worker_id, answers.progress(handoff))

    def _write_failed(self, request: PrefillRequest, error: BaseException) -> None:
        if not self._is_fencing(request):
            self._runtime.peers.mark_failed(request.peer)
            self._fail(request, "transfer_failed", f"a write to {request.peer.worker_id} failed: {error}")

    def _send_heartbeats(self) -> None:
        """Where a decode worker's connection is broken it has given its prompts up, or is dead."""
        for worker, progress in answers.heartbeats(self.ledger, self._unconnected).items():
            if self._runtime.send(worker, progress):
                continue
            for request in list(self._requests.values()):
                if request.peer.worker_id == worker:
                    self._fail(request, "unreachable", f"the connection to {worker} broke")

    def _cancelled(self, sender: str, incarnation: int, cancel: CancelPrefill) -> None:
        request = self._requests.get(engine_id(sender, cancel.key))
        if request is not None:
            if request.peer.incarnation == incarnation:
                self._fence(request, cancel.reason, None)
            return
        self._unconnected = [
            one for one in self._unconnected if (one.sender, one.message.key) != (sender, cancel.key)
        ]
        # Not here: over, or not arrived yet, and then it shall not start. Nothing will be written.
        self._over.add(engine_id(sender, cancel.key))
        self._runtime.send(sender, HandoffFenced(key=cancel.key))

    def _fail(self, request: PrefillRequest, code: str, reason: str, *, retryable: bool = True) -> None:
        self._fence(request, reason, RequestError(code=code, message=reason, retryable=retryable))

    def _fence(self, request: PrefillRequest, reason: str, error: RequestError | None) -> None:
        """Stop, and say so once the writes under way have ended. Blocks that are being read stay pinned."""
        handoff = self.ledger.get(request.message.key)
        if handoff is None or handoff.state not in FENCEABLE_STATES:
            return  # over, or being stopped already
        if error is not None:
            self._events.failed(error.code)
            logger.warning("prefill of %s stopped: %s", request.message.key, reason)
        request.error = error
        self._advance(request, HandoffEvent.FENCE)
        self._engine.run(lambda engine: engine.abort(request.engine_id, hold=True))
        self._settle(request)

    def _settle(self, request: PrefillRequest) -> None:
        """Go on once nothing is under way: confirm the fence, or seal."""
        if request.operations_in_flight or request.engine_id not in self._requests:
            return
        if self._is_fencing(request):
            self._end(request, HandoffEvent.FENCED)
            self._runtime.send(request.peer.worker_id, answers.fenced(request))
        elif request.output is not None:
            self._seal(request, request.output)

    def _seal(self, request: PrefillRequest, output: SequenceOutput) -> None:
        sealed = answers.sealed(request, self._handoff(request), output, self._clock.monotonic())
        self._advance(request, HandoffEvent.SEAL)
        future = self._runtime.transport.notify(request.peer, msgspec.msgpack.encode(sealed))
        future.add_done_callback(
            lambda done: self._runtime.post(lambda: self._seal_done(request, sealed.timings, done))
        )

    def _seal_done(self, request: PrefillRequest, timings: RequestTimings, future: Future[None]) -> None:
        if request.engine_id not in self._requests:
            return
        error = future.exception()
        if error is not None and not self._is_fencing(request):
            self._runtime.peers.mark_failed(request.peer)
            self._fail(request, "transfer_failed", f"a seal to {request.peer.worker_id} failed: {error}")
            return
        self._advance(request, HandoffEvent.ACTIVATE)
        self._end(request, HandoffEvent.RELEASE)
        self._events.first_token(timings)

    def _end(self, request: PrefillRequest, event: HandoffEvent) -> None:
        self._advance(request, event)
        self.ledger.close(request.message.key)
        del self._requests[request.engine_id]
        self._over.add(request.engine_id)
        self._engine.run(lambda engine: engine.release(request.engine_id))

    def _handoff(self, request: PrefillRequest) -> Handoff:
        handoff = self.ledger.get(request.message.key)
        assert handoff is not None, request.engine_id
        return handoff

    def _is_fencing(self, request: PrefillRequest) -> bool:
        return self._handoff(request).state is HandoffState.FENCING

    def _advance(
        self,
        request: PrefillRequest,
        event: HandoffEvent,
        *,
        num_landed_blocks: int = 0,
        num_bytes: int = 0,
    ) -> Handoff:
        return self.ledger.transition(
            request.message.key,
            event,
            self._clock.unix(),
            num_landed_blocks=num_landed_blocks,
            num_bytes=num_bytes,
        )
