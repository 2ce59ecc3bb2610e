"""A worker's load: made by its engine, completed and published by the worker, read by routers and metrics."""

from __future__ import annotations

from typing import Literal

import msgspec

WorkerState = Literal["starting", "ready", "draining"]


class QueueLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences by what they wait for."""

    running: int = 0  # in the running batch
    waiting: int = 0  # queued, not counting those that wait for remote KV
    waiting_for_remote_kv: int = 0
    waiting_prefill_tokens: int = 0  # uncached tokens still to compute here, running and waiting
    preemptions_total: int = 0


class KvLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV blocks are, in blocks, and what the prefix cache has found, in tokens."""

    blocks_total: int = 0
    blocks_free: int = 0  # allocatable, cached ones included
    blocks_cached: int = 0  # free, but holding a reusable prefix
    blocks_reserved: int = 0  # promised to a writer that has not sealed yet
    blocks_pinned: int = 0  # of requests that are gone, being sent to a peer
    blocks_quarantined: int = 0  # cancelled, but the writer has not confirmed that it stopped
    prefix_queries_total: int = 0  # tokens looked up when a request was first admitted
    prefix_hits_total: int = 0  # tokens found then


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One engine step, for a model of what steps cost."""

    num_tokens: int  # computed
    num_context_tokens: int  # positions attended to, summed over the sequences
    num_sequences: int
    duration_ms: float


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's steps did. From two ``steps_total`` one knows how many of ``recent`` are new."""

    steps_total: int = 0
    average_ms: float = 0.0  # moving average of one step
    prompt_tokens_total: int = 0  # computed here or found in the cache; recomputed ones count once
    generation_tokens_total: int = 0  # sampled here
    recent: tuple[StepSample, ...] = ()  # the newest steps, oldest first


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's load. Totals count since its start."""

    queue: QueueLoad = QueueLoad()
    kv: KvLoad = KvLoad()
    steps: StepLoad = StepLoad()


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The path from a worker into one peer's KV cache, in GB/s (10^9 bytes); 0 where nothing was measured."""

    peer: str
    probe_gbps: float  # when they were connected
    gbps: float  # moving average over large writes since


class TransferCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's transport has done since it started. Warm-up writes are not counted."""

    writes_total: int = 0  # that have landed
    writes_failed_total: int = 0
    bytes_total: int = 0  # of writes that have landed, like the next two
    descriptors_total: int = 0  # after merging
    write_seconds_total: float = 0.0  # sum of durations, overlapped ones included
    notifications_sent_total: int = 0
    notifications_received_total: int = 0
    notifications_dropped_total: int = 0  # from agents that are no current peers
    peers_added_total: int = 0
    peers_failed_total: int = 0  # dropped because a write or notification to them failed
    polls_total: int = 0


class LoadReport(Load, frozen=True, kw_only=True):
    """What a worker publishes each interval; also its entry under ``load`` in ``/cluster``."""

    state: WorkerState = "starting"
    role_epoch: int = 0  # of the role when this was reported, see WorkerRecord
    num_leaving: int = 0  # in hand, handoffs included, of a role that is no longer advertised
    handoffs: dict[str, int] = msgspec.field(default_factory=dict)  # live ones by state; only states with any
    links: tuple[LinkReport, ...] = ()  # to all connected peers
    transfers: TransferCounters = TransferCounters()
