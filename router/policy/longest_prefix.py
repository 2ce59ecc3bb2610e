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

from dataclasses import dataclass

from cluster.members import takes_prefills
from router.policy.narrowing import Narrowing, first_lowest
from router.policy.plan import Candidate, NoWorkerError, Plan, RequestSnapshot
from router.state.cluster_state import ClusterState
from router.state.columns import Column
from router.state.worker_view import WorkerView

_MAX_REASONS = 4  # in an error


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What an operator can tune."""

    local_prefill_max_tokens: int  # uncached prompts up to this length are prefilled by the decode worker
    overload_factor: float
    overload_slack: int  # requests
    max_failed_prefills: int  # after so many the decode worker prefills the request itself


class LongestPrefixPolicy:
    """See ``router.policy.plan.Policy``, and the head of this file for the rule."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def plan(self, state: ClusterState, request: RequestSnapshot, now: float) -> Plan:
        """Plan one request. Raises NoWorkerError if no decode worker can take it."""
        pool = state.pool(request.model)
        cached = state.cached_tokens(pool, request.hashes, request.num_tokens)
        decoding = Narrowing(pool.decode)
        decode = self._choose_decode_worker(state, request, cached, decoding)
        uncached = request.num_tokens - int(cached[decode.slot])
        prefilling = Narrowing(pool.prefill)
        prefill: WorkerView | None = None
        reason = self._why_local(request, decode, uncached)
        rows = _rows(state, cached, decoding, "decode") if request.is_explained else ()
        if not reason:
            prefill = self._choose_prefill_worker(state, request, cached, decode, prefilling)
            rows += _rows(state, cached, prefilling, "prefill") if request.is_explained else ()
        if prefill is None:
            reason = f"local prefill: {reason or 'no compatible prefill worker is ready'}"
        else:
            reason = f"remote prefill: {uncached} uncached tokens on the decode worker"
        return Plan(
            decode_worker=decode.record.id,
            prefill_worker=None if prefill is None else prefill.record.id,
            reason=reason,
            cached_tokens=request.num_tokens - uncached,
            uncached_tokens=request.num_tokens - int(cached[(prefill or decode).slot]),
            candidates=rows,
        )

    def _choose_decode_worker(
        self, state: ClusterState, request: RequestSnapshot, cached: Column, workers: Narrowing
    ) -> WorkerView:
        columns, pool = state.columns, workers.slots
        _keep_able(state, request, workers)
        if not len(workers.slots):
            reasons = workers.reasons()
            first = [f"{state.at(slot).record.id} {reasons[slot]}" for slot in pool[:_MAX_REASONS]]
            raise NoWorkerError(first, len(pool))
        has_room = columns.kv_tokens_free[workers.slots] + cached[workers.slots] > request.num_tokens
        if has_room.any():
            workers.keep(has_room, lambda slot: "has too few free KV blocks")
        requests = columns.num_requests
        limit = int(requests[workers.slots].min()) * self._settings.overload_factor
        limit += self._settings.overload_slack
        workers.keep(
            requests[workers.slots] <= limit,
            lambda slot: f"is overloaded: {requests[slot]} requests, limit {limit:g}",
        )
        return state.at(
            first_lowest(workers.slots, -cached, requests, columns.prefill_tokens, -columns.kv_blocks_free)
        )

    def _why_local(self, request: RequestSnapshot, decode: WorkerView, uncached: int) -> str:
        """Why the decode worker shall prefill whatever prefill workers there are; "" if it need not."""
        settings = self._settings
        if uncached <= settings.local_prefill_max_tokens:
            most = settings.local_prefill_max_tokens
            return f"{uncached} uncached tokens, at most {most} are prefilled locally"
        if request.num_failed_prefills >= settings.max_failed_prefills:
            return f"{request.num_failed_prefills} prefill workers have failed this request"
        if takes_prefills(decode.record.role):
            return "the decode worker takes prefills, too"
        return ""

    def _choose_prefill_worker(
        self,
        state: ClusterState,
        request: RequestSnapshot,
        cached: Column,
        decode: WorkerView,
        workers: Narrowing,
    ) -> WorkerView | None:
        columns = state.columns
        workers.keep(
            columns.compatibility[workers.slots] == columns.compatibility[decode.slot],
            lambda slot: f"cannot hand over to {decode.record.id}: not compatible",
        )
        _keep_able(state, request, workers)
        if not len(workers.slots):
            return None
        work = columns.prefill_tokens + request.num_tokens - cached
        limit = int(work[workers.slots].min()) * self._settings.overload_factor
        workers.keep(
            work[workers.slots] <= limit,
            lambda slot: f"is overloaded: {work[slot]} tokens, limit {limit:g}",
        )
        return state.at(first_lowest(workers.slots, -cached, work, columns.num_requests))


def _keep_able(state: ClusterState, request: RequestSnapshot, workers: Narrowing) -> None:
    """Drop those that cannot take the request at all."""
    columns, num_tokens = state.columns, request.num_tokens

    def why_too_long(slot: int) -> str:
        worker = state.at(slot)
        longest = worker.record.model.max_model_len
        if num_tokens >= longest:
            return f"takes at most {longest} tokens"
        assert worker.load is not None
        return (
            f"has only {worker.load.kv.blocks_total} KV blocks of {worker.record.kv_layout.block_size} tokens"
        )

    workers.keep(
        columns.accepts[workers.slots],
        lambda slot: f"is {state.at(slot).state}",
    )
    for worker in request.excluded_workers:
        view = state.get(worker)
        if view is not None:
            workers.keep(workers.slots != view.slot, lambda slot: "already failed this request")
    workers.keep(columns.max_tokens[workers.slots] >= num_tokens, why_too_long)


def _rows(state: ClusterState, cached: Column, workers: Narrowing, role: str) -> tuple[Candidate, ...]:
    """What each worker that was in question had to offer, in the order of the ids."""
    reasons, columns = workers.reasons(), state.columns
    slots = sorted([*map(int, workers.slots), *reasons], key=lambda slot: state.at(slot).record.id)
    return tuple(
        Candidate(
            worker=state.at(slot).record.id,
            role=role,
            eligible=slot not in reasons,
            reason=reasons.get(slot, ""),
            cached_tokens=int(cached[slot]),
            num_requests=int(columns.num_requests[slot]),
            num_outstanding_prefill_tokens=int(columns.prefill_tokens[slot]),
            kv_blocks_free=int(columns.kv_blocks_free[slot]),
        )
        for slot in slots
    )
