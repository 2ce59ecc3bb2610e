"""Every message that one process sends another, as msgspec structs in MessagePack.

Routers talk to workers in their decode role, and these to workers in their prefill role. Answers go back
over the same ZeroMQ connection. A prefill's seal is the exception: it travels as a NIXL notification, behind
the data.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.load import LoadReport
from cluster.members import Role
from cluster.sequence_spec import RequestKey, SequenceSpec

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """Why one request failed. ``code`` is stable, ``message`` is for people."""

    code: str
    message: str
    retryable: bool = False  # whether another worker might succeed
    worker: str = ""  # which worker failed, if not the one that says so


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position, from the raw distribution (before temperature and masks)."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one request's time went, in ms, and where its prompt came from, in tokens.

    ``queue_ms + prefill_queue_ms + prefill_ms + transfer_ms + activate_ms`` is the time from the decode
    worker's receipt of the request to its first token.
    ``num_computed_tokens + num_prefill_cached_tokens + num_decode_cached_tokens`` is the prompt's length.
    """

    queue_ms: float = 0.0  # decode worker: receipt until blocks are reserved (or until scheduled, if local)
    prefill_queue_ms: float = 0.0  # message to the prefill worker and wait for its first chunk
    prefill_ms: float = 0.0  # first chunk scheduled until first token sampled
    transfer_ms: float = 0.0  # what the transfer added: first token sampled until the last block landed
    activate_ms: float = 0.0  # seal received until the first token left the engine
    transfer_busy_ms: float = 0.0  # sum of the durations of the individual writes, overlapped ones included
    transfer_bytes: int = 0
    transfer_descriptors: int = 0
    num_computed_tokens: int = 0  # prompt tokens run through the model for this request
    num_prefill_cached_tokens: int = 0  # found in the prefill worker's prefix cache and transferred
    num_decode_cached_tokens: int = 0  # found in the decode worker's own prefix cache
    prefill_worker: str = ""  # "" if the decode worker prefilled locally
    decode_worker: str = ""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Router → decode worker: produce the answer to one prompt."""

    key: RequestKey
    spec: SequenceSpec
    prefill_worker: str | None = None  # None: prefill locally


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Decode worker → prefill worker: compute this prompt and write its KV into my blocks.

    The prompt is all of ``spec.num_tokens``, earlier attempts' output included.
    ``block_ids[i]`` takes logical block ``first_block + i`` of it. Blocks before ``first_block`` are
    already here. Sent again while nothing is heard: a writer that knows it ignores that, one that is done
    with it answers ``HandoffFenced``.
    """

    key: RequestKey
    spec: SequenceSpec
    prefill_incarnation: int  # the life of the prefill worker that is meant; another one must not write
    first_block: int
    block_ids: list[int]


class Sealed(msgspec.Struct, frozen=True, kw_only=True, tag="sealed"):
    """Prefill worker → decode worker, as a NIXL notification after the last write has landed."""

    key: RequestKey
    incarnation: int  # the prefill worker's
    token_id: int  # the first output token
    logprobs: TokenLogprobs | None
    timings: RequestTimings
    checksums: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (index in block_ids, xxh3)


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Router → decode worker: stop this request."""

    key: RequestKey
    reason: str = "client"


class CancelPrefill(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_prefill"):
    """Decode worker → prefill worker: stop this prompt, and say so with ``HandoffFenced``."""

    key: RequestKey
    reason: str


class HandoffFenced(msgspec.Struct, frozen=True, kw_only=True, tag="fenced"):
    """Prefill worker → decode worker: I have stopped, and will never again write into your blocks.

    ``error`` is set where the prefill failed on its own, and None where it answers a CancelPrefill.
    """

    key: RequestKey
    error: RequestError | None = None


class HandoffLanding(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How far one handoff has come."""

    key: RequestKey
    num_landed_blocks: int  # leading ones of ``Prefill.block_ids``; they are never written again
    num_bytes: int  # landed so far


class HandoffProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Prefill worker → decode worker: I work on these; it extends their leases.

    Sent when blocks have landed, and each heartbeat for all handoffs in hand. What the decode worker does not
    know, it cancels.
    """

    handoffs: list[HandoffLanding]


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's share of an engine step."""

    key: RequestKey
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
    error: RequestError | None = None
    timings: RequestTimings | None = None  # with the first token


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Decode worker → router: one message per engine step for all of that router's requests."""

    outputs: list[TokenOutput]


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """Router → worker: send me your KV events and load reports from now on. Renewed with each heartbeat."""

    snapshot: bool = True  # whether the whole prefix cache is wanted; a renewal that knows it says no


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events"):
    """Worker → subscribed routers: how the prefix cache changed since event ``sequence - 1``.

    With ``snapshot`` set, ``stored`` is the whole cache and replaces what the router knew.
    """

    sequence: int
    stored: list[bytes] = msgspec.field(default_factory=list)
    removed: list[bytes] = msgspec.field(default_factory=list)
    snapshot: bool = False


class LoadUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Worker → subscribed routers: the load report of this interval."""

    load: LoadReport


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Router → worker, on an operator's order: take no new work, finish what runs, then exit."""


class SetRole(msgspec.Struct, frozen=True, kw_only=True, tag="set_role"):
    """Router → worker, on an operator's order: take new work of this role only, and finish what you have."""

    role: Role


Message = (
    Generate
    | Prefill
    | Sealed
    | Cancel
    | CancelPrefill
    | HandoffFenced
    | HandoffProgress
    | TokenBatch
    | Subscribe
    | KvEvents
    | LoadUpdate
    | Drain
    | SetRole
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message with its sender. Receivers drop envelopes of older incarnations."""

    sender: str  # worker or router id
    incarnation: int
    message: Message
