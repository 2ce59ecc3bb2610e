"""Sequences that lose their worker: they move with their tokens, or wait for a worker, and end once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.members import WorkerRecord
from cluster.messages import (
    Cancel,
    Envelope,
    Generate,
    LoadUpdate,
    Message,
    RequestError,
    RequestTimings,
    TokenBatch,
    TokenOutput,
)
from cluster.sampling_params import SamplingParams
from router import dispatch
from router.cluster_view import ClusterView
from router.dispatch import Dispatcher
from router.in_flight import Generation, SequenceRequest
from router.metrics import RouterMetrics
from router.policy.choose_workers import PolicySettings
from router.policy.plan import NoWorkerError
from tests.router.factories import RecordingConnection, load_report, worker_record


class Bench:
    """A dispatcher over a real view, whose workers are played by the test."""

    def __init__(self) -> None:
        self.connections: dict[str, RecordingConnection] = {}
        self.log: list[tuple[str, Message]] = []  # what was sent, to whom
        self.view = ClusterView(
            connect=self.connect,
            on_tokens=lambda worker, batch: self.dispatcher.on_tokens(worker, batch),
            on_worker_lost=lambda worker: self.dispatcher.on_worker_lost(worker),
            on_dropped=lambda reason: None,
        )
        self.dispatcher = Dispatcher(self.view, PolicySettings(local_prefill_max_tokens=16), RouterMetrics())
        self.incarnations: dict[str, int] = {}

    def connect(
        self, record: WorkerRecord, on_message: Callable[[Envelope], None], disconnect: Callable[[], None]
    ) -> RecordingConnection:
        bench = self

        class Logged(RecordingConnection):
            def send(self, message: Message) -> None:
                super().send(message)
                bench.log.append((record.id, message))

        self.connections[record.id] = Logged(record, on_message, disconnect)
        return self.connections[record.id]

    def workers(self, **incarnations: int) -> None:
        """These decode workers are registered now, and ready; underscores stand for dashes."""
        self.incarnations = {name.replace("_", "-"): number for name, number in incarnations.items()}
        records = [worker_record(name, "decode", number) for name, number in self.incarnations.items()]
        self.view.update(records, ())
        for name in self.incarnations:
            self.say(name, LoadUpdate(load=load_report(state="ready")))

    def say(self, worker: str, message: Message) -> None:
        self.connections[worker].answer(message)

    def start(self, **fields: Any) -> Generation:
        request = SequenceRequest(
            request_id="r",
            model=worker_record("w").model.name,
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(max_tokens=10, seed=9),
            **fields,
        )
        return self.dispatcher.start([request], timeout_ms=60_000)

    def sent(self, kind: type[Message]) -> list[tuple[str, Any]]:
        return [(worker, message) for worker, message in self.log if isinstance(message, kind)]

    def tokens(self, worker: str, *token_ids: int, attempt: int = 0, **fields: Any) -> None:
        output = TokenOutput(request_id="r", attempt=attempt, token_ids=list(token_ids), **fields)
        self.say(worker, TokenBatch(outputs=[output]))


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def received(generation: Generation) -> list[TokenOutput]:
    outputs = await asyncio.wait_for(generation.next(), 5)
    return [output for _, output in outputs]


async def test_an_answer_that_has_begun_moves_with_its_tokens(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    ((first, generate),) = bench.sent(Generate)
    other = "d1" if first == "d0" else "d0"
    bench.tokens(first, 5, timings=RequestTimings(prefill_ms=1.0))
    bench.tokens(first, 6)
    bench.workers(**{other: 1})  # the first is gone
    ((_, _), (second, moved)) = bench.sent(Generate)
    assert second == other
    assert moved.attempt == generate.attempt + 1
    assert moved.output_token_ids == [5, 6]
    assert moved.sampling == generate.sampling
    assert moved.deadline == generate.deadline
    bench.tokens(other, 7, attempt=1, timings=RequestTimings(prefill_ms=2.0))
    bench.tokens(other, 8, attempt=1, finish_reason="length")
    outputs = await received(generation)
    assert [token for output in outputs for token in output.token_ids] == [5, 6, 7, 8]
    assert [output.timings for output in outputs[1:]] == [None] * 3
    assert outputs[-1].finish_reason == "length"
    assert len(bench.dispatcher.in_flight) == 0


async def test_late_tokens_of_the_old_attempt_are_dropped(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.tokens("d0", error=RequestError(code="draining", message="drains", retryable=True))
    bench.workers(d0=1, d1=1)
    await asyncio.sleep(0.3)
    bench.tokens("d0", 99, attempt=0)
    ((_, _), (worker, _)) = bench.sent(Generate)
    bench.tokens(worker, 5, attempt=1, finish_reason="stop")
    assert [token for output in await received(generation) for token in output.token_ids] == [5]


async def test_it_waits_for_the_lost_worker_to_come_back(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.tokens("d0", 5)
    bench.workers()
    assert len(bench.sent(Generate)) == 1
    await asyncio.sleep(0.3)
    bench.workers(d0=2)
    await asyncio.sleep(0.3)
    assert [message.output_token_ids for _, message in bench.sent(Generate)] == [[], [5]]
    bench.tokens("d0", 6, attempt=1, finish_reason="stop")
    assert [token for output in await received(generation) for token in output.token_ids] == [5, 6]


async def test_a_waiting_request_can_be_cancelled(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    bench.workers()
    bench.dispatcher.close(generation, "client")
    bench.workers(d0=2)
    await asyncio.sleep(0.3)
    assert len(bench.sent(Generate)) == 1


async def test_the_wait_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "RECOVERY_WAIT_S", 0.0)
    bench.workers(d0=1)
    generation = bench.start()
    bench.workers()
    (output,) = await received(generation)
    assert output.error is not None
    assert output.error.code == "worker_lost"


async def test_attempts_are_bounded(bench: Bench) -> None:
    bench.workers(d0=1)
    generation = bench.start()
    for attempt in range(dispatch.MAX_ATTEMPTS):
        bench.tokens(
            "d0", attempt=attempt, error=RequestError(code="engine_error", message="no", retryable=True)
        )
        await asyncio.sleep(0.25)
    (output,) = await received(generation)
    assert output.error is not None
    assert output.error.code == "engine_error"


async def test_an_error_that_another_worker_would_repeat_ends_the_request(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    ((worker, _),) = bench.sent(Generate)
    bench.tokens(worker, error=RequestError(code="invalid_request", message="no"))
    (output,) = await received(generation)
    assert output.error is not None
    assert len(bench.sent(Generate)) == 1


async def test_a_cancel_reaches_the_worker_that_has_it_now(bench: Bench) -> None:
    bench.workers(d0=1, d1=1)
    generation = bench.start()
    ((first, _),) = bench.sent(Generate)
    other = "d1" if first == "d0" else "d0"
    bench.workers(**{other: 1})
    bench.dispatcher.close(generation, "client")
    ((worker, cancel),) = bench.sent(Cancel)
    assert (worker, cancel.attempt) == (other, 1)


async def test_without_any_worker_a_new_request_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(NoWorkerError):
        bench.start()
    assert len(bench.dispatcher.in_flight) == 0
