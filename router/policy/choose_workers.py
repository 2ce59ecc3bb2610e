"""Choose the decode worker of a request, and the prefill worker if the prompt is worth handing over.

Decode worker: among the workers that can take the request, drop those that are *overloaded* (more than
``overload_factor`` times the least loaded one's requests, plus ``overload_slack``), then take the one with
the longest cached prefix, then the fewest requests, then the most free KV blocks. The overload rule bounds
how far a popular prefix can pull requests to one worker: with the defaults, a worker with 10 requests loses
its hits once another has 2 or fewer. Workers whose free blocks cannot hold the prompt are used only if all
are so. One that takes prefills as well computes its requests' prompts itself.

Prefill worker: the same with outstanding prefill tokens as the load. Unlike requests, those tokens are the
very work a cached prefix saves, so here the two add up: least (outstanding + uncached) tokens wins ties of
prefix length, and a worker whose sum exceeds ``overload_factor`` times the smallest sum is overloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policy.plan import (
    Candidate,
    NoWorkerError,
    Plan,
    RequestSnapshot,
    WorkerSnapshot,
    blocks_needed,
)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What an operator can tune."""

    local_prefill_max_tokens: int  # uncached prompts up to this length are prefilled by the decode worker
    overload_factor: float
    overload_slack: int  # requests
    max_failed_prefills: int  # after so many the decode worker prefills the request itself


def choose_workers(
    request: RequestSnapshot,
    decode_workers: Sequence[WorkerSnapshot],
    prefill_workers: Sequence[WorkerSnapshot],
    settings: PolicySettings,
) -> Plan:
    """Plan one request. Raises NoWorkerError if no decode worker can take it.

    ``decode_workers`` and ``prefill_workers`` carry their own ``cached_tokens`` for this request. A prefill
    worker is considered only if it is among the decode worker's ``peers``.
    """
    decode, decode_rows = _choose_decode_worker(request, decode_workers, settings)
    cached = _usable_cached_tokens(request, decode)
    uncached = request.num_tokens - cached
    reason, rows = _why_local(request, decode, uncached, prefill_workers, settings), decode_rows
    prefill: WorkerSnapshot | None = None
    if not reason:
        prefill, prefill_rows = _choose_prefill_worker(request, decode, prefill_workers, settings)
        reason, rows = "no compatible prefill worker is ready", decode_rows + prefill_rows
    if prefill is None:
        return Plan(
            decode_worker=decode.id,
            prefill_worker=None,
            reason=f"local prefill: {reason}",
            cached_tokens=cached,
            uncached_tokens=uncached,
            candidates=rows,
        )
    return Plan(
        decode_worker=decode.id,
        prefill_worker=prefill.id,
        reason=f"remote prefill: {uncached} uncached tokens on the decode worker",
        cached_tokens=cached,
        uncached_tokens=request.num_tokens - _usable_cached_tokens(request, prefill),
        candidates=rows,
    )


def _why_local(
    request: RequestSnapshot,
    decode: WorkerSnapshot,
    uncached: int,
    prefill_workers: Sequence[WorkerSnapshot],
    settings: PolicySettings,
) -> str:
    """Why the decode worker shall prefill whatever prefill workers there are; "" if it need not."""
    if uncached <= settings.local_prefill_max_tokens:
        most = settings.local_prefill_max_tokens
        return f"{uncached} uncached tokens, at most {most} are prefilled locally"
    if request.num_failed_prefills >= settings.max_failed_prefills:
        return f"{request.num_failed_prefills} prefill workers have failed this request"
    if any(worker.id == decode.id for worker in prefill_workers):
        return "the decode worker takes prefills, too"
    return ""


def _choose_decode_worker(
    request: RequestSnapshot, workers: Sequence[WorkerSnapshot], settings: PolicySettings
) -> tuple[WorkerSnapshot, tuple[Candidate, ...]]:
    passed_over = {worker.id: _why_not(request, worker) for worker in workers}
    eligible = [worker for worker in workers if not passed_over[worker.id]]
    if not eligible:
        raise NoWorkerError(tuple(f"{worker.id} {passed_over[worker.id]}" for worker in workers))
    roomy = [worker for worker in eligible if _has_room(request, worker)]
    if roomy:
        with_room = {worker.id for worker in roomy}
        for worker in eligible:
            if worker.id not in with_room:
                passed_over[worker.id] = "has too few free KV blocks"
        eligible = roomy
    limit = min(worker.num_requests for worker in eligible) * settings.overload_factor
    limit += settings.overload_slack
    for worker in eligible:
        if worker.num_requests > limit:
            passed_over[worker.id] = f"is overloaded: {worker.num_requests} requests, limit {limit:g}"
    eligible = [worker for worker in eligible if worker.num_requests <= limit]
    best = min(
        eligible,
        key=lambda worker: (
            -_usable_cached_tokens(request, worker),
            worker.num_requests,
            worker.num_outstanding_prefill_tokens,
            -worker.kv_blocks_free,
            worker.id,
        ),
    )
    return best, tuple(_row(worker, "decode", passed_over[worker.id]) for worker in workers)


def _choose_prefill_worker(
    request: RequestSnapshot,
    decode: WorkerSnapshot,
    workers: Sequence[WorkerSnapshot],
    settings: PolicySettings,
) -> tuple[WorkerSnapshot | None, tuple[Candidate, ...]]:
    passed_over = {
        worker.id: (
            _why_not(request, worker)
            if worker.id in decode.peers
            else f"cannot hand over to {decode.id}: not compatible"
        )
        for worker in workers
    }
    eligible = [worker for worker in workers if not passed_over[worker.id]]
    best: WorkerSnapshot | None = None
    if eligible:
        work = {
            worker.id: worker.num_outstanding_prefill_tokens
            + request.num_tokens
            - _usable_cached_tokens(request, worker)
            for worker in eligible
        }
        limit = min(work.values()) * settings.overload_factor
        for worker in eligible:
            if work[worker.id] > limit:
                passed_over[worker.id] = f"is overloaded: {work[worker.id]} tokens, limit {limit:g}"
        best = min(
            (worker for worker in eligible if work[worker.id] <= limit),
            key=lambda worker: (
                -_usable_cached_tokens(request, worker),
                work[worker.id],
                worker.num_requests,
                worker.id,
            ),
        )
    return best, tuple(_row(worker, "prefill", passed_over[worker.id]) for worker in workers)


def _why_not(request: RequestSnapshot, worker: WorkerSnapshot) -> str:
    """Why this worker cannot take the request at all; "" if it can."""
    if not worker.is_reachable:
        return "is unreachable"
    if worker.state != "ready":
        return f"is {worker.state}"
    if worker.id in request.excluded_workers:
        return "already failed this request"
    if request.num_tokens >= worker.max_model_len:
        return f"takes at most {worker.max_model_len} tokens"
    if worker.kv_blocks_total and worker.kv_blocks_total < blocks_needed(
        request.num_tokens, 0, worker.block_size
    ):
        return f"has only {worker.kv_blocks_total} KV blocks of {worker.block_size} tokens"
    return ""


def _has_room(request: RequestSnapshot, worker: WorkerSnapshot) -> bool:
    if worker.kv_blocks_total == 0:  # no load report yet
        return True
    needed = blocks_needed(request.num_tokens, _usable_cached_tokens(request, worker), worker.block_size)
    return worker.kv_blocks_free >= needed


def _usable_cached_tokens(request: RequestSnapshot, worker: WorkerSnapshot) -> int:
    # The last token is always computed: its logits are needed.
    usable = min(worker.cached_tokens, request.num_tokens - 1)
    return max(0, usable // worker.block_size * worker.block_size)


def _row(worker: WorkerSnapshot, role: str, passed_over: str) -> Candidate:
    return Candidate(
        worker=worker.id,
        role=role,
        eligible=not passed_over,
        reason=passed_over,
        cached_tokens=worker.cached_tokens,
        num_requests=worker.num_requests,
        num_outstanding_prefill_tokens=worker.num_outstanding_prefill_tokens,
        kv_blocks_free=worker.kv_blocks_free,
    )
