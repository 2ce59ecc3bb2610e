"""The decode worker's side of every handoff: blocks promised to prefill workers, and how they come back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from cluster.members import Peer
from cluster.messages import (
    CancelPrefill,
    HandoffFenced,
    HandoffProgress,
    Prefill,
    RequestError,
    Sealed,
)
from cluster.rpc import RpcError
from cluster.sequence_spec import RequestKey
from decode_worker.prefill_links import PrefillLinks
from decode_worker.request_table import DecodeRequest, engine_id
from engine.step_result import Reservation
from kv_transfer.handoff import FENCEABLE_STATES, Handoff, HandoffEvent, HandoffState
from kv_transfer.handoff_ledger import HandoffLedger
from worker_runtime.events import WorkerEvents
from worker_runtime.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

REPEAT_CANCEL_S = 1.0  # while a prefill worker has not confirmed that it stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFailure:
    """A handoff that its prefill worker did not bring to its end."""

    key: RequestKey
    worker: str
    reason: str
    num_landed_tokens: int  # from the prompt's start, those cached here before included
    may_still_write: bool  # into what has not landed: those blocks must be quarantined
    refusal: RequestError | None = None  # the request itself is at fault: nobody else would take it either


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillEndings:
    """What becomes of handoffs. All are called in the worker's event loop."""

    on_sealed: Callable[[Sealed], None]  # the prompt is here: run the sequence
    on_failed: Callable[[PrefillFailure], None]  # somebody else must compute the rest
    on_corrupt: Callable[[RequestKey], None]  # the prompt must be computed here


class RemotePrefills:
    """Handoffs from prefill workers into this worker's KV cache.

    Every handoff ends in exactly one of: ``on_sealed``; ``on_corrupt``; ``on_failed``; or ``cancel``. If its
    writer may still write then, its blocks leave the quarantine once the writer has said that it has stopped,
    or is gone. No timer frees a block. A writer that is not heard of for a lease is given up.
    """

    def __init__(
        self, runtime: WorkerRuntime, events: WorkerEvents, links: PrefillLinks, endings: PrefillEndings
    ) -> None:
        self.ledger = HandoffLedger(events.handoff_ended)
        self._runtime = runtime
        self._events = events
        self._links = links
        self._endings = endings
        self._block_size = runtime.block_size
        self._lease_s = runtime.lease_s
        self._transport = runtime.transport
        self._verifier = runtime.verifier
        self._clock = runtime.clock
        self._post = runtime.post
        self._wanted: dict[RequestKey, Prefill] = {}  # what was asked for
        self._cancel_sent_at: dict[RequestKey, float] = {}  # unix seconds

    def start(self, request: DecodeRequest, reservation: Reservation) -> None:
        """Blocks are reserved: ask the request's prefill worker to fill those that are not cached here."""
        peer = request.prefill_peer
        assert peer is not None, request.engine_id
        generate = request.request
        first_block = reservation.num_cached_tokens // self._block_size
        block_ids = reservation.block_ids[first_block:]
        now = self._clock.unix()
        handoff = self.ledger.open(
            key=request.key,
            prefill=peer,
            decode=self._runtime.own,
            block_ids=block_ids,
            now=now,
            deadline=generate.spec.deadline,
            lease_expires_at=now + self._lease_s,
        )
        self._transport.expect_traffic(request.engine_id)
        message = Prefill(
            key=request.key,
            spec=generate.spec,
            prefill_incarnation=peer.incarnation,
            first_block=first_block,
            block_ids=list(block_ids),
        )
        self._wanted[request.key] = message
        try:
            self._links.send(peer, message)
        except RpcError as error:  # it never heard of the blocks, so it cannot write them
            self._give_up(handoff, str(error), HandoffEvent.FENCED)
            return
        self._advance(handoff, HandoffEvent.STREAM)

    def on_progress(self, peer: Peer, progress: HandoffProgress) -> None:
        """A prefill worker says what it has in hand for this worker, and what of it has landed."""
        expires_at = self._clock.unix() + self._lease_s
        for landing in progress.handoffs:
            handoff = self.ledger.get(landing.key)
            if handoff is None or handoff.prefill != peer:
                self._send_cancel(peer, landing.key, "unknown here")
            elif handoff.state in (HandoffState.STREAMING, HandoffState.FENCING):
                self.ledger.renew_lease(landing.key, expires_at)
                self._land(handoff, landing.num_landed_blocks, landing.num_bytes)

    def on_sealed(self, sealed: Sealed) -> None:
        """The writer has written everything and sampled the first token."""
        handoff = self.ledger.get(sealed.key)
        if handoff is None or handoff.prefill.incarnation != sealed.incarnation or handoff.is_sealed:
            self._events.dropped("unknown_handoff")
            return
        if handoff.state is HandoffState.FENCING:
            self._end_fenced(handoff, HandoffEvent.SEAL)
            return
        self._land(handoff, len(handoff.block_ids), sealed.timings.transfer_bytes)
        handoff = self._advance(handoff, HandoffEvent.SEAL)
        expected = {index: checksum for index, checksum in sealed.checksums if index < len(handoff.block_ids)}
        if not expected or self._verifier.mode == "off":
            self._activate(handoff, sealed)
            return
        summing = self._verifier.checksums([handoff.block_ids[index] for index in expected])
        summing.add_done_callback(lambda done: self._post(lambda: self._verify(sealed, expected, done)))

    def on_fenced(self, peer: Peer, fenced: HandoffFenced) -> None:
        """The writer has stopped: on our ``Cancel``, or because it failed by itself."""
        handoff = self.ledger.get(fenced.key)
        if handoff is None or handoff.prefill != peer or handoff.is_sealed:  # a seal was faster
            self._events.dropped("unknown_handoff")
            return
        if handoff.state is HandoffState.FENCING:
            self._end_fenced(handoff, HandoffEvent.FENCED)
            return
        error = fenced.error
        self._give_up(
            handoff,
            "the prefill worker stopped" if error is None else error.message,
            HandoffEvent.FENCED,
            refusal=None if error is None or error.retryable else error,
        )

    def cancel(self, key: RequestKey, reason: str) -> bool:
        """Call a handoff off. True: its blocks must be quarantined, the writer may still write into them.

        False: there is no handoff to call off, or its writer has finished.
        """
        handoff = self.ledger.get(key)
        if handoff is None or handoff.state not in FENCEABLE_STATES:
            return False
        is_sealed = handoff.is_sealed
        handoff = self._advance(handoff, HandoffEvent.FENCE)
        if is_sealed:
            self._end(handoff, HandoffEvent.FENCED)
        else:
            self._send_cancel(handoff.prefill, key, reason)
        return not is_sealed

    def on_tick(self) -> None:
        """Give up silent writers, and repeat cancels: a message may be lost where a connection breaks."""
        now = self._clock.unix()
        for handoff in self.ledger.lease_expired(now):
            self._events.lease_expired()
            reason = f"{handoff.prefill.worker_id} was not heard of for {self._lease_s:g} s"
            self._give_up(handoff, reason, None)
        for handoff in self.ledger:
            if handoff.state is not HandoffState.FENCING:
                continue
            sent_at = self._cancel_sent_at.get(handoff.key, handoff.fenced_at)
            if now - sent_at >= REPEAT_CANCEL_S:
                self._send_cancel(handoff.prefill, handoff.key, "repeated")

    def on_unreachable(self, peer: Peer) -> None:
        """The connection to a prefill worker broke: it may be dead, or may go on writing."""
        for handoff in self.ledger.with_peer(peer):
            if handoff.state is HandoffState.STREAMING:
                self._give_up(handoff, f"the connection to {peer.worker_id} broke", None)

    def on_peer_lost(self, peer: Peer) -> None:
        """A prefill worker is dead and its agent is removed: it cannot write any more."""
        for handoff in self.ledger.with_peer(peer):
            if handoff.state is HandoffState.FENCING:
                self._end_fenced(handoff, HandoffEvent.WRITER_GONE)
            elif not handoff.is_sealed:
                self._give_up(handoff, f"{peer.worker_id} is gone", HandoffEvent.WRITER_GONE)

    def _verify(self, sealed: Sealed, expected: dict[int, int], summing: Future[list[int]]) -> None:
        handoff = self.ledger.get(sealed.key)
        if handoff is None:
            return  # cancelled meanwhile
        found = zip(expected.items(), summing.result(), strict=True)
        wrong = [index for (index, checksum), here in found if checksum != here]
        if not wrong:
            self._activate(handoff, sealed)
            return
        logger.error(
            "handoff %s from %s: %d of %d checked blocks differ from what was sent (first: index "
            "%d, block %d); the prompt is computed here",
            sealed.key,
            handoff.prefill.worker_id,
            len(wrong),
            len(expected),
            wrong[0],
            handoff.block_ids[wrong[0]],
        )
        handoff = self._advance(handoff, HandoffEvent.FENCE)
        self._end(handoff, HandoffEvent.FENCED)
        self._endings.on_corrupt(sealed.key)

    def _activate(self, handoff: Handoff, sealed: Sealed) -> None:
        self._advance(handoff, HandoffEvent.ACTIVATE)
        self._end(handoff, HandoffEvent.RELEASE)
        self._endings.on_sealed(sealed)

    def _give_up(
        self,
        handoff: Handoff,
        reason: str,
        proof: HandoffEvent | None,
        *,
        refusal: RequestError | None = None,
    ) -> None:
        """``proof`` says that the writer has stopped; without one it must still be made to."""
        message = self._wanted[handoff.key]
        failure = PrefillFailure(
            key=handoff.key,
            worker=handoff.prefill.worker_id,
            reason=reason,
            num_landed_tokens=min(
                (message.first_block + handoff.num_landed_blocks) * self._block_size, message.spec.num_tokens
            ),
            may_still_write=proof is None,
            refusal=refusal,
        )
        handoff = self._advance(handoff, HandoffEvent.FENCE)
        if proof is None:
            self._send_cancel(handoff.prefill, handoff.key, reason)
        else:
            self._end(handoff, proof)
        self._endings.on_failed(failure)

    def _send_cancel(self, peer: Peer, key: RequestKey, reason: str) -> None:
        if self.ledger.get(key) is not None:
            self._cancel_sent_at[key] = self._clock.unix()
        with contextlib.suppress(RpcError):  # it is repeated, until the peer answers or is gone
            self._links.send(peer, CancelPrefill(key=key, reason=reason))

    def _land(self, handoff: Handoff, num_landed_blocks: int, num_bytes: int) -> None:
        """``num_bytes`` have landed in all; what comes late says less than is known."""
        self.ledger.transition(
            handoff.key,
            HandoffEvent.LAND,
            self._clock.unix(),
            num_landed_blocks=min(num_landed_blocks, len(handoff.block_ids)),
            num_bytes=max(0, num_bytes - handoff.bytes_landed),
        )

    def _end_fenced(self, handoff: Handoff, proof: HandoffEvent) -> None:
        self._end(handoff, proof)
        self._runtime.engine.run(lambda engine: engine.release_quarantined(engine_id(handoff.key)))

    def _end(self, handoff: Handoff, event: HandoffEvent) -> None:
        self._advance(handoff, event)
        self.ledger.close(handoff.key)
        self._wanted.pop(handoff.key, None)
        self._cancel_sent_at.pop(handoff.key, None)
        self._transport.stop_expecting(engine_id(handoff.key))

    def _advance(self, handoff: Handoff, event: HandoffEvent) -> Handoff:
        return self.ledger.transition(handoff.key, event, self._clock.unix())
