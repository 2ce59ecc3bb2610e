"""A decode worker without a model: real RPC sockets, and answers that a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from cluster.load import LoadReport
from cluster.members import WorkerRecord
from cluster.messages import (
    Cancel,
    Generate,
    KvEvents,
    LoadUpdate,
    Message,
    RequestError,
    RequestTimings,
    Subscribe,
    TokenBatch,
    TokenOutput,
)
from cluster.rpc import RpcServer
from tests.router.factories import load_report, worker_record

Script = Callable[[Generate], AsyncIterator[dict[str, Any]]]  # fields of one TokenOutput after another

EOS = 2  # the bundled model's <|im_end|>


class ScriptedWorker:
    """Answers each Generate with what ``script`` yields; records what it was sent."""

    def __init__(self, worker_id: str = "d0", *, script: Script, **record_fields: Any) -> None:
        self.id = worker_id
        self.script = script
        self.load: LoadReport = load_report()
        self.cached_blocks: list[bytes] = []
        self.generates: list[Generate] = []
        self.cancels: list[Cancel] = []
        self.other_messages: list[Message] = []
        self.record = worker_record(worker_id, **record_fields)
        self._record_fields = record_fields
        self._rpc = RpcServer(sender=worker_id, incarnation=self.record.incarnation, on_message=self._receive)
        self._answers: dict[tuple[str, int], asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        """Requests being answered."""
        return len(self._answers)

    @property
    def num_malformed(self) -> int:
        """Messages that could not be read."""
        return self._rpc.num_malformed

    async def start(self) -> WorkerRecord:
        """Listen, and return the registration."""
        address = await self._rpc.bind("tcp://127.0.0.1:0")
        self.record = worker_record(self.id, **{**self._record_fields, "address": address})
        return self.record

    async def stop(self) -> None:
        """Vanish."""
        for task in tuple(self._answers.values()):
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)
        await self._rpc.close()

    def _receive(self, router: str, incarnation: int, message: Message) -> None:
        if isinstance(message, Subscribe):
            self._rpc.send(router, LoadUpdate(load=self.load))
            if message.snapshot:
                self._rpc.send(router, KvEvents(sequence=0, stored=self.cached_blocks, snapshot=True))
        elif isinstance(message, Generate):
            self.generates.append(message)
            key = message.key
            self._answers[key] = asyncio.create_task(self._answer(router, message))
            self._answers[key].add_done_callback(lambda task: self._answers.pop(key))
        elif isinstance(message, Cancel):
            self.cancels.append(message)
            task = self._answers.get(message.key)
            if task is not None:
                task.cancel()
        else:
            self.other_messages.append(message)

    async def _answer(self, router: str, message: Generate) -> None:
        async for fields in self.script(message):
            output = TokenOutput(key=message.key, **fields)
            self._rpc.send(router, TokenBatch(outputs=[output]))


def timings(prompt: Sequence[int], **fields: Any) -> RequestTimings:
    """Timings of a prompt that was computed whole, unless ``fields`` say otherwise."""
    return RequestTimings(**{"num_computed_tokens": len(prompt), "decode_worker": "d0", **fields})


def answer(
    token_ids: Sequence[int],
    *,
    finish_reason: str = "stop",
    stop_reason: int | None = None,
    cached_tokens: int = 0,
    logprobs: Callable[[int], Any] | None = None,
) -> Script:
    """One token per message and the finish reason with the last one."""

    async def script(message: Generate) -> AsyncIterator[dict[str, Any]]:
        prompt = message.spec.prompt_token_ids
        for index, token_id in enumerate(token_ids):
            fields: dict[str, Any] = {"token_ids": [token_id]}
            if index == 0:
                fields["timings"] = timings(
                    prompt,
                    num_computed_tokens=len(prompt) - cached_tokens,
                    num_decode_cached_tokens=cached_tokens,
                )
            if logprobs is not None:
                fields["logprobs"] = [logprobs(token_id)]
            if index == len(token_ids) - 1:
                fields |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
            yield fields
            await asyncio.sleep(0)

    return script


def endless(token_id: int, *, first: int = 10**9) -> Script:
    """The same token until cancelled; with ``first``, only so many, and then silence."""

    async def script(message: Generate) -> AsyncIterator[dict[str, Any]]:
        for index in range(first):
            more = {"timings": timings(message.spec.prompt_token_ids)} if index == 0 else {}
            yield {"token_ids": [token_id], **more}
            await asyncio.sleep(0.001)
        await asyncio.Event().wait()

    return script


def silent() -> Script:
    """No answer until cancelled."""
    return endless(0, first=0)


def failing(code: str, message: str = "it failed", *, retryable: bool = False) -> Script:
    """An error instead of an answer."""

    async def script(request: Generate) -> AsyncIterator[dict[str, Any]]:
        yield {
            "finish_reason": "error",
            "error": RequestError(code=code, message=message, retryable=retryable),
        }

    return script


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fails with ``what`` where it does not."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - any condition, not an event
            await asyncio.sleep(0.002)

    await within(poll(), what)


async def within(waiting: Awaitable[Any], what: str) -> Any:
    """The result, or a failure that names ``what`` was waited for."""
    try:
        return await asyncio.wait_for(waiting, 20)
    except TimeoutError:
        raise AssertionError(f"waited in vain for: {what}") from None
