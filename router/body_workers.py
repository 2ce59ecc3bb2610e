"""Works on bodies in other processes, so that no body stops the event loop.

What a body costs is paid while Python's lock is held, by JSON, by pydantic, by a template; threads would not
help. So each process takes one body after another, and a bounded number of bytes waits for them. Large bodies
never take the last process: the others do not wait behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cluster.end_with_parent import end_with_parent
from router.body_process import LENGTH, Call, Result, frame
from router.metrics import RouterMetrics
from text_pipeline.text_model import TextModel

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TooManyBodiesError(Exception):
    """Too many bytes wait already."""


class BodyNotPreparedError(Exception):
    """The body took too long, or ended its processes."""


LARGE_BODY_BYTES = 256 * 1024
MAX_WORK_S = 60.0  # on one body: only a template that does not end takes longer
_START_TIMEOUT_S = 60.0
_MAX_ATTEMPTS = 2
_READ_AHEAD_BYTES = 2**20


class BodyWorkers:
    """The processes of one router. They are started when they are needed, and again when they die.

    All methods run in the event loop.
    """

    def __init__(
        self,
        load_text_models: Callable[[], Mapping[str, TextModel]],
        metrics: RouterMetrics,
        *,
        num_processes: int,
        max_waiting_bytes: int,
        max_work_s: float = MAX_WORK_S,
    ) -> None:
        """``load_text_models`` must be picklable: each process calls it once."""
        self._load_text_models = load_text_models
        self._metrics = metrics
        self._max_waiting_bytes = max_waiting_bytes
        self._max_work_s = max_work_s
        self._num_waiting_bytes = 0
        self._slots = asyncio.Semaphore(num_processes)
        self._large_slots = asyncio.Semaphore(max(1, num_processes - 1))
        self._processes: set[_BodyProcess] = set()
        self._idle: list[_BodyProcess] = []
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run now."""
        return tuple(process.pid for process in self._processes)

    async def run(
        self, function: Callable[..., T], context: object, data: bytes, expected: type[Exception] = ValueError
    ) -> T:
        """``function(text models by name, context, data)`` in another process.

        Raises what it raises of ``expected``, and RuntimeError for another exception; TooManyBodiesError, and
        BodyNotPreparedError if it takes longer than ``max_work_s`` or its process dies twice. If the caller
        is cancelled, a call that waits is dropped; one that has begun ends for nobody.
        """
        is_large = len(data) > LARGE_BODY_BYTES
        await self._wait_for_slot(len(data), is_large)
        task = asyncio.create_task(self._work_in_slot(Call(function, (context, data), expected), is_large))
        self._work.add(task)
        task.add_done_callback(self._forget)
        result: T = await asyncio.shield(task)
        return result

    async def start(self) -> None:
        """Have a process ready, so that the first body does not wait for one."""
        async with self._slots:
            if not self._processes:
                self._idle.append(await self._new_process())

    async def close(self) -> None:
        """End all processes, and the work in them."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*map(self._end, tuple(self._processes)))

    async def _wait_for_slot(self, size: int, is_large: bool) -> None:
        if self._num_waiting_bytes + size > self._max_waiting_bytes:
            self._metrics.refused.inc()
            raise TooManyBodiesError(f"{self._num_waiting_bytes} bytes of request bodies wait already")
        self._num_waiting_bytes += size
        self._metrics.bodies_waiting.inc()
        try:
            if is_large:
                await self._large_slots.acquire()
            try:
                await self._slots.acquire()
            except BaseException:
                if is_large:
                    self._large_slots.release()
                raise
        finally:
            self._num_waiting_bytes -= size
            self._metrics.bodies_waiting.dec()

    async def _work_in_slot(self, call: Call, is_large: bool) -> Any:
        self._metrics.bodies_in_work.inc()
        try:
            result = await self._call(call)
        finally:
            self._metrics.bodies_in_work.dec()
            self._slots.release()
            if is_large:
                self._large_slots.release()
        if result.error is not None:
            raise result.error
        if result.failure:
            raise RuntimeError(f"working on a body failed:\n{result.failure}")
        return result.value

    async def _call(self, call: Call) -> Result:
        packed = frame(call)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            process: _BodyProcess | None = None
            try:
                process = self._idle.pop() if self._idle else await self._new_process()
                async with asyncio.timeout(self._max_work_s):
                    result = await process.call(packed)
            except TimeoutError:
                logger.warning("a body that took longer than %g s was given up", self._max_work_s)
                break
            except (OSError, EOFError) as error:
                logger.warning("a process for bodies ended (attempt %d): %r", attempt, error)
            else:
                self._idle.append(process)
                return result
            finally:
                if process is not None and process not in self._idle:
                    await self._end(process)
        raise BodyNotPreparedError

    async def _new_process(self) -> _BodyProcess:
        process = await _BodyProcess.start()
        self._processes.add(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await process.call(frame(self._load_text_models))
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _end(self, process: _BodyProcess) -> None:
        self._processes.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        self._metrics.body_processes_ended.inc()
        await process.end()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have left


class _BodyProcess:
    """One process and its pipes. Takes one call at a time; a call that is broken off leaves it useless."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls) -> _BodyProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "router.body_process"),
            stdin=PIPE,
            stdout=PIPE,
            limit=_READ_AHEAD_BYTES,
            preexec_fn=end_with_parent(),
            # One text is tokenized at a time, and needs no threads.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        return cls(process)

    async def call(self, packed: tuple[bytes, bytes]) -> Result:
        """Send one frame and wait for the result. Raises OSError or EOFError when the process has ended."""
        calls, results = self._process.stdin, self._process.stdout
        assert calls is not None
        assert results is not None
        for part in packed:
            calls.write(part)
        await calls.drain()
        (length,) = LENGTH.unpack(await results.readexactly(LENGTH.size))
        result = pickle.loads(await results.readexactly(length))
        assert isinstance(result, Result)
        return result

    async def end(self) -> None:
        """Kill it and wait for it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
