"""Pushes finished KV blocks of prompts into decode workers' caches, and takes their checksums meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.step_result import PrefillProgress
from kv_transfer.transport import TransferStats, WriteAbandonedError
from prefill_worker.prefill_request import PrefillRequest
from worker_runtime.runtime import WorkerRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEvents:
    """What becomes of pushes. All are called in the worker's event loop."""

    on_landed: Callable[[PrefillRequest, int, int, TransferStats], None]  # blocks from, to (exclusive)
    on_failed: Callable[[PrefillRequest, BaseException], None]
    on_settled: Callable[[PrefillRequest], None]  # one operation less is in flight


class BlockPushes:
    """One write per prompt and engine step; ``operations_in_flight`` counts what reads a request's blocks."""

    def __init__(self, runtime: WorkerRuntime, events: PushEvents) -> None:
        self._block_size = runtime.block_size
        self._transport = runtime.transport
        self._verifier = runtime.verifier
        self._post = runtime.post
        self._events = events

    def push(self, request: PrefillRequest, progress: PrefillProgress) -> None:
        """Write what ``progress`` has finished and the decode worker has not yet.

        Raises ``ValueError`` if the request names blocks that the decode worker does not have.
        """
        num_tokens = request.message.spec.num_tokens
        end = progress.num_computed_tokens // self._block_size
        if progress.num_computed_tokens >= num_tokens:  # the last block may be partly filled
            end = -(-num_tokens // self._block_size)
        start = request.next_block
        if end <= start:
            return
        request.next_block = end
        offset = request.message.first_block
        writing = self._transport.write_blocks(
            request.peer,
            progress.block_ids[start:end],
            request.message.block_ids[start - offset : end - offset],
        )
        request.operations_in_flight += 1
        writing.add_done_callback(
            lambda done: self._post(lambda: self._write_done(request, start, end, done))
        )
        self._take_checksums(request, progress, start, end)

    def _take_checksums(
        self, request: PrefillRequest, progress: PrefillProgress, start: int, end: int
    ) -> None:
        checked = [block for block in range(start, end) if block in request.checked_blocks]
        if not checked:
            return
        request.operations_in_flight += 1
        summing = self._verifier.checksums([progress.block_ids[block] for block in checked])
        summing.add_done_callback(
            lambda done: self._post(lambda: self._checksums_done(request, checked, done))
        )

    def _write_done(
        self, request: PrefillRequest, start: int, end: int, future: Future[TransferStats]
    ) -> None:
        error = future.exception()
        if isinstance(error, WriteAbandonedError) and not error.over.done():
            # It may still land: the decode worker must not hear that the writing has ended.
            error.over.add_done_callback(
                lambda _: self._post(lambda: self._write_done(request, start, end, future))
            )
            return
        request.operations_in_flight -= 1
        if error is not None:
            self._events.on_failed(request, error)
        else:
            stats = future.result()
            request.transfer_descriptors += stats.num_descriptors
            request.transfer_busy_ms += stats.duration_ms
            self._events.on_landed(request, start, end, stats)
        self._events.on_settled(request)

    def _checksums_done(self, request: PrefillRequest, blocks: list[int], future: Future[list[int]]) -> None:
        request.operations_in_flight -= 1
        request.checksums.update(zip(blocks, future.result(), strict=True))
        self._events.on_settled(request)
