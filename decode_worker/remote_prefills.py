"""The decode worker's side of every handoff: blocks promised to prefill workers, and how they come back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.messages import Cancel, HandoffFenced, Message, Prefill, Sealed
from cluster.rpc import RpcError
from decode_worker.request_table import DecodeRequest, engine_id
from engine.step_result import Reservation
from kv_transfer.handoff import FENCEABLE_STATES, Handoff, HandoffEvent, HandoffState
from kv_transfer.handoff_ledger import HandoffLedger
from kv_transfer.transport import Peer, Transport

logger = logging.getLogger(__name__)

REPEAT_CANCEL_S = 1.0  # while a prefill worker has not confirmed that it stopped
REPEAT_PREFILL_S = 5.0  # while neither a seal nor a refusal has come


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefillActions:
    """What the handoffs ask of their surroundings. All are called in the worker's event loop."""

    send: Callable[[Peer, Message], None]  # to a prefill worker; raises RpcError
    on_sealed: Callable[[Sealed], None]  # the prompt is here: run the sequence
    on_failed: Callable[[str, int, str], None]  # (request id, attempt, why): compute the prompt here
    release_quarantined: Callable[[str], None]  # engine id: the writer is done, its blocks are free


class RemotePrefills:
    """Handoffs from prefill workers into this worker's KV cache.

    Every handoff ends in exactly one of: ``on_sealed``; ``on_failed``; or, once it was fenced by ``cancel``,
    ``release_quarantined`` after the writer said that it has stopped or is gone. No timer frees a block.
    """

    def __init__(
        self, *, own: Peer, block_size: int, transport: Transport, clock: Clock, actions: RemotePrefillActions
    ) -> None:
        self.ledger = HandoffLedger()
        self._own = own
        self._block_size = block_size
        self._transport = transport
        self._clock = clock
        self._actions = actions
        self._unanswered: dict[str, Prefill] = {}  # by engine id, to be sent again
        self._sent_at: dict[str, float] = {}  # by engine id: the last repetition, unix seconds

    def start(self, request: DecodeRequest, reservation: Reservation) -> None:
        """Blocks are reserved: ask the request's prefill worker to fill those that are not cached here."""
        peer = request.prefill_peer
        assert peer is not None, request.engine_id
        generate = request.request
        first_block = reservation.num_cached_tokens // self._block_size
        block_ids = reservation.block_ids[first_block:]
        self.ledger.open(
            request_id=generate.request_id,
            attempt=generate.attempt,
            prefill=peer,
            decode=self._own,
            block_ids=block_ids,
            now=self._clock.unix(),
            deadline=generate.deadline,
        )
        self._transport.expect_traffic(request.engine_id)
        message = Prefill(
            request_id=generate.request_id,
            attempt=generate.attempt,
            prompt_token_ids=generate.prompt_token_ids,
            sampling=generate.sampling,
            prefill_incarnation=peer.incarnation,
            first_block=first_block,
            block_ids=list(block_ids),
            cache_salt=generate.cache_salt,
            deadline=generate.deadline,
        )
        try:
            self._actions.send(peer, message)
        except RpcError as error:  # it never heard of the blocks, so it cannot write them
            handoff = self._fence(generate.request_id, generate.attempt, str(error))
            self._end(handoff, HandoffEvent.FENCED)
            self._actions.on_failed(generate.request_id, generate.attempt, str(error))
            return
        self._advance(generate.request_id, generate.attempt, HandoffEvent.STREAM)
        self._unanswered[request.engine_id] = message

    def on_sealed(self, sealed: Sealed) -> None:
        """The writer has written everything and sampled the first token."""
        handoff = self.ledger.get(sealed.request_id, sealed.attempt)
        if handoff is None or handoff.prefill.incarnation != sealed.incarnation:
            logger.info("dropped a seal of unknown handoff %s attempt %d", sealed.request_id, sealed.attempt)
            return
        if handoff.state is HandoffState.FENCING:
            self._end(handoff, HandoffEvent.SEAL)
            self._actions.release_quarantined(engine_id(sealed.request_id, sealed.attempt))
            return
        self._advance(
            sealed.request_id, sealed.attempt, HandoffEvent.LAND, num_bytes=sealed.timings.transfer_bytes
        )
        self._advance(sealed.request_id, sealed.attempt, HandoffEvent.SEAL)
        self._advance(sealed.request_id, sealed.attempt, HandoffEvent.ACTIVATE)
        self._end(handoff, HandoffEvent.RELEASE)
        self._actions.on_sealed(sealed)

    def on_fenced(self, peer: Peer, fenced: HandoffFenced) -> None:
        """The writer has stopped: on our ``Cancel``, or because it failed by itself."""
        handoff = self.ledger.get(fenced.request_id, fenced.attempt)
        if handoff is None or handoff.prefill != peer:
            return  # a seal was faster
        if handoff.state is HandoffState.FENCING:
            self._end(handoff, HandoffEvent.FENCED)
            self._actions.release_quarantined(engine_id(fenced.request_id, fenced.attempt))
            return
        reason = fenced.error.message if fenced.error is not None else "the prefill worker stopped"
        handoff = self._fence(fenced.request_id, fenced.attempt, reason)
        self._end(handoff, HandoffEvent.FENCED)
        self._actions.on_failed(fenced.request_id, fenced.attempt, reason)

    def cancel(self, request_id: str, attempt: int, reason: str) -> bool:
        """Call a handoff off. True: its blocks must be quarantined, the writer may still write into them.

        False: there is no handoff to call off.
        """
        handoff = self.ledger.get(request_id, attempt)
        if handoff is None or handoff.state not in FENCEABLE_STATES:
            return False
        self._fence(request_id, attempt, reason)
        try:
            self._actions.send(handoff.prefill, Cancel(request_id=request_id, attempt=attempt, reason=reason))
        except RpcError as error:
            logger.warning("cannot tell %s to stop: %s", handoff.prefill.worker_id, error)
        return True

    def repeat_unanswered(self) -> None:
        """Send what was not answered for long again: a message may be lost where a connection breaks."""
        now = self._clock.unix()
        for handoff in self.ledger:
            key = engine_id(handoff.request_id, handoff.attempt)
            message: Message
            if handoff.state is HandoffState.FENCING:
                repeat_s = REPEAT_CANCEL_S
                message = Cancel(request_id=handoff.request_id, attempt=handoff.attempt, reason="repeated")
            elif handoff.state is HandoffState.STREAMING:
                repeat_s, message = REPEAT_PREFILL_S, self._unanswered[key]
            else:
                continue
            if now - self._sent_at.get(key, handoff.changed_at) >= repeat_s:
                self._sent_at[key] = now
                with contextlib.suppress(RpcError):  # its lease decides
                    self._actions.send(handoff.prefill, message)

    def on_peer_lost(self, peer: Peer) -> None:
        """A prefill worker is dead and its agent is removed: it cannot write any more."""
        for handoff in self.ledger.with_peer(peer):
            was_cancelled = handoff.state is HandoffState.FENCING
            if not was_cancelled:
                handoff = self._fence(handoff.request_id, handoff.attempt, f"{peer.worker_id} is gone")
            self._end(handoff, HandoffEvent.WRITER_GONE)
            if was_cancelled:
                self._actions.release_quarantined(engine_id(handoff.request_id, handoff.attempt))
            else:
                self._actions.on_failed(handoff.request_id, handoff.attempt, f"{peer.worker_id} is gone")

    def _fence(self, request_id: str, attempt: int, reason: str) -> Handoff:
        return self._advance(request_id, attempt, HandoffEvent.FENCE, reason=reason)

    def _end(self, handoff: Handoff, event: HandoffEvent) -> None:
        self._advance(handoff.request_id, handoff.attempt, event)
        self.ledger.close(handoff.request_id, handoff.attempt)
        key = engine_id(handoff.request_id, handoff.attempt)
        self._unanswered.pop(key, None)
        self._sent_at.pop(key, None)
        self._transport.stop_expecting(key)

    def _advance(
        self, request_id: str, attempt: int, event: HandoffEvent, *, num_bytes: int = 0, reason: str = ""
    ) -> Handoff:
        return self.ledger.transition(
            request_id, attempt, event, self._clock.unix(), num_bytes=num_bytes, reason=reason
        )
