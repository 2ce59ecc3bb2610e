"""A steady load of real requests from a bounded number of clients, and what became of each of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

HANG_S = 120.0  # without a byte for so long, a request counts as hanging
_READY_WAIT_S = 60.0
_READY_POLL_S = 0.05


class Outcome(StrEnum):
    """What became of a request, measured at the answer of an undisturbed run."""

    EQUAL = "equal"
    LEFT = "left"  # its client went away on purpose; what it had read was right
    CONNECTION_ERROR = "connection error"  # what it had read until then was right
    ERROR_RESPONSE = "error response"
    CUT_SHORT = "cut short"  # ended without an error, and without its end
    WRONG = "wrong"
    HANGS = "hangs"


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What one client asks for. Equal names have equal answers."""

    name: str
    path: str  # of the API, for example "/v1/completions"
    body: Mapping[str, Any]

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes token by token."""
        return bool(self.body.get("stream"))


@dataclass(kw_only=True)
class Answer:
    """What one client got. Times are monotonic seconds."""

    request: LoadRequest
    started_at: float
    ended_at: float = 0.0
    content_at: list[float] = field(default_factory=list)  # of each chunk with text or tokens
    text: str = ""
    logprobs: list[tuple[str, float]] = field(default_factory=list)  # (token, log-probability)
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None  # (prompt tokens, completion tokens)
    is_complete: bool = False
    has_left: bool = False
    connection_error: str = ""
    error: str = ""  # an error that the server sent
    hangs: bool = False

    def outcome(self, expected: Answer) -> Outcome:
        """Compare with the undisturbed answer to the same request."""
        if self.hangs:
            return Outcome.HANGS
        if self.error:
            return Outcome.ERROR_RESPONSE
        if self.has_left or self.connection_error:
            if not expected.text.startswith(self.text):
                return Outcome.WRONG
            return Outcome.LEFT if self.has_left else Outcome.CONNECTION_ERROR
        if not self.is_complete:
            return Outcome.CUT_SHORT
        return Outcome.EQUAL if self._content() == expected._content() else Outcome.WRONG

    def gaps(self) -> list[tuple[float, float]]:
        """From the request to the first token, and from each token to the next, as (begin, end)."""
        moments = [self.started_at, *self.content_at]
        return list(itertools.pairwise(moments))

    def describe(self, expected: Answer) -> str:
        """For a person who must find out why it is not right."""
        return (
            f"{self.request.name}: {self.outcome(expected)} after {self.ended_at - self.started_at:.2f} s "
            f"{self.error}{self.connection_error}\n  undisturbed: {expected._content()}\n"
            f"  now:         {self._content()}"
        )

    def _content(self) -> tuple[object, ...]:
        return (self.text, self.finish_reason, self.usage, self.logprobs)


async def ask(
    client: httpx.AsyncClient,
    request: LoadRequest,
    *,
    cache_salt: str = "",
    leave_after_s: float | None = None,
    on_content: Callable[[int], None] = lambda _num_chunks: None,
) -> Answer:
    """Send one request and read its answer, whatever comes; the client leaves after ``leave_after_s``.

    ``on_content`` is called with the number of chunks so far.
    """
    answer = Answer(request=request, started_at=time.monotonic())
    body = {**request.body, "cache_salt": cache_salt}
    try:
        async with asyncio.timeout(leave_after_s):
            if request.is_stream:
                await _read_stream(client, answer, body, on_content)
            else:
                await _read_whole(client, answer, body)
    except TimeoutError:
        answer.has_left = True
    except httpx.TimeoutException:
        answer.hangs = True
    except httpx.TransportError as error:
        answer.connection_error = repr(error)
    answer.ended_at = time.monotonic()
    return answer


class SteadyLoad:
    """Clients that send one request after the other, from a thread of its own until ``finish``.

    A client that loses its connection waits for ``/ready`` before it goes on, as a load balancer would.
    """

    def __init__(
        self,
        url: str,
        requests: Sequence[LoadRequest],
        *,
        num_clients: int,
        seed: int = 0,
        leave_within_s: float | None = None,
    ) -> None:
        """With ``leave_within_s``, every other client leaves at a random time within so many seconds."""
        self._url = url
        self._requests = list(requests)
        self._num_clients = num_clients
        self._leave_within_s = leave_within_s
        self._random = random.Random(seed)
        self._num_started = 0
        self._is_finishing = threading.Event()
        self._failure: BaseException | None = None
        self.answers: list[Answer] = []  # of requests that have ended; read-only for others
        self._thread = threading.Thread(target=self._run, name="steady load")
        self._thread.start()

    def wait_for_more(self, num_answers: int, timeout_s: float = HANG_S) -> None:
        """Until so many more requests have ended."""
        give_up_at = time.monotonic() + timeout_s
        target = len(self.answers) + num_answers
        while len(self.answers) < target and self._thread.is_alive():
            if time.monotonic() > give_up_at:
                raise AssertionError(f"{len(self.answers)} requests have ended, not {target} as awaited")
            time.sleep(0.02)

    def finish(self) -> list[Answer]:
        """Start no more requests; the answers of all, once the last one has ended."""
        self._is_finishing.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self.answers

    def __enter__(self) -> SteadyLoad:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_finishing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._run_clients())
        except BaseException as error:
            self._failure = error

    async def _run_clients(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._num_clients):
                clients.create_task(self._client())

    async def _client(self) -> None:
        async with new_client(self._url) as client:
            while not self._is_finishing.is_set():
                answer = await self._next(client)
                self.answers.append(answer)
                if answer.connection_error:
                    await self._until_ready(client)

    async def _next(self, client: httpx.AsyncClient) -> Answer:
        if self._num_started % len(self._requests) == 0:
            self._random.shuffle(self._requests)
        request = self._requests[self._num_started % len(self._requests)]
        self._num_started += 1
        leave_after_s = None
        if self._leave_within_s is not None and self._random.random() < 0.5:
            leave_after_s = self._random.uniform(0, self._leave_within_s)
        # Mostly prompts that nobody has cached, so that prefill workers have something to do.
        salt = "shared" if self._random.random() < 0.2 else f"{id(self)} {self._num_started}"
        return await ask(client, request, cache_salt=salt, leave_after_s=leave_after_s)

    async def _until_ready(self, client: httpx.AsyncClient) -> None:
        give_up_at = time.monotonic() + _READY_WAIT_S
        while time.monotonic() < give_up_at:
            try:
                if (await client.get("/ready", timeout=5)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(_READY_POLL_S)


def new_client(url: str) -> httpx.AsyncClient:
    """A client that opens a connection for each request, so that none is sent into a connection that died."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=HANG_S,
        trust_env=False,
        limits=httpx.Limits(max_keepalive_connections=0),
    )


def undisturbed_answers(url: str, requests: Sequence[LoadRequest]) -> dict[str, Answer]:
    """By name: what each request is answered while nothing happens. Fails unless all are complete."""

    async def ask_all() -> list[Answer]:
        async with new_client(url) as client:
            return [
                answer
                for index in range(0, len(requests), 2)
                for answer in await asyncio.gather(
                    *(ask(client, one, cache_salt="undisturbed") for one in requests[index : index + 2])
                )
            ]

    answers = {answer.request.name: answer for answer in asyncio.run(ask_all())}
    for answer in answers.values():
        assert answer.outcome(answer) is Outcome.EQUAL, answer.describe(answer)
    return answers


def check_answers(
    answers: Sequence[Answer], undisturbed: Mapping[str, Answer], *also_allowed: Outcome
) -> None:
    """Fail, with both texts, unless each answer is the undisturbed one or has ended as is allowed besides."""
    wrong = [
        answer.describe(undisturbed[answer.request.name])
        for answer in answers
        if answer.outcome(undisturbed[answer.request.name]) not in (Outcome.EQUAL, *also_allowed)
    ]
    assert not wrong, f"{len(wrong)} of {len(answers)} answers:\n" + "\n".join(wrong)


async def _read_whole(client: httpx.AsyncClient, answer: Answer, body: Mapping[str, Any]) -> None:
    response = await client.post(answer.request.path, json=body)
    if response.status_code != 200:
        answer.error = f"{response.status_code}: {response.text}"
        return
    _take(answer, response.json())
    answer.is_complete = True


async def _read_stream(
    client: httpx.AsyncClient,
    answer: Answer,
    body: Mapping[str, Any],
    on_content: Callable[[int], None],
) -> None:
    async with client.stream("POST", answer.request.path, json=body) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.is_complete = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    answer.error = f"error event: {chunk['error']}"
                elif _take(answer, chunk):
                    answer.content_at.append(time.monotonic())
                    on_content(len(answer.content_at))


def _take(answer: Answer, body: Mapping[str, Any]) -> bool:
    """Add a chunk, or a whole answer; whether it had tokens in it."""
    has_content = False
    if body.get("usage"):
        answer.usage = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
    for choice in body["choices"]:
        text = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content")
        logprobs = choice.get("logprobs") or {}
        tokens = [(one["token"], one["logprob"]) for one in logprobs.get("content") or ()]
        tokens += zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
        answer.text += text or ""
        answer.logprobs += tokens
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        has_content = has_content or bool(text or tokens)
    return has_content
