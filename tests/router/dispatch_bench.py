"""A dispatcher over a real view, whose workers, clock and timers are played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from cluster.block_hash import hash_blocks, root_hash
from cluster.clock import ManualClock
from cluster.config.settings import RouterConfig
from cluster.members import Role, WorkerRecord
from cluster.messages import (
    Envelope,
    Generate,
    KvEvents,
    LoadUpdate,
    Message,
    RequestError,
    TokenBatch,
    TokenOutput,
)
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import RequestKey, SequenceSpec
from router.cluster_view import ClusterView
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.in_flight import Generation, SequenceRequest
from router.dispatch.request_queue import RequestQueue
from router.metrics import RouterMetrics
from router.policy.longest_prefix import LongestPrefixPolicy
from router.policy.plan import Plan
from router.services import policy_settings
from tests.router.factories import (
    BLOCK_SIZE,
    RecordingConnection,
    load_report,
    members_of,
    model_identity,
    worker_record,
)

TIMEOUT_MS = 600_000
MAX_WAIT_MS = 5_000
LOCAL_MAX_TOKENS = 16  # longer prompts are prefilled remotely


class ManualTimers:
    """Timers that go off while the test moves the clock on."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._num_started = 0
        self._pending: dict[int, tuple[float, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __call__(self, delay_s: float, function: Callable[[], None]) -> _ManualTimer:
        self._num_started += 1
        self._pending[self._num_started] = (self._clock.unix() + delay_s, function)
        return _ManualTimer(self._pending, self._num_started)

    def advance(self, seconds: float) -> None:
        """Run what falls due within ``seconds``, in its order and each at its time."""
        end = self._clock.unix() + seconds
        while self._pending:
            number, (due, function) = min(self._pending.items(), key=lambda item: (item[1][0], item[0]))
            if due > end:
                break
            del self._pending[number]
            self._clock.advance(max(0.0, due - self._clock.unix()))
            function()
        self._clock.advance(max(0.0, end - self._clock.unix()))


class _ManualTimer:
    def __init__(self, pending: dict[int, tuple[float, Callable[[], None]]], number: int) -> None:
        self._pending = pending
        self._number = number

    def cancel(self) -> None:
        self._pending.pop(self._number, None)


class Bench:
    """A dispatcher over a real view. ``log`` is what was sent, to whom, in order."""

    def __init__(self, max_sequences: int = 100, max_waiting: int = 0) -> None:
        self.connections: dict[str, RecordingConnection] = {}
        self.log: list[tuple[str, Message]] = []
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.metrics = RouterMetrics()
        self.view = ClusterView(
            connect=self._connect,
            on_tokens=lambda worker, batch: self.dispatcher.on_tokens(worker, batch),
            on_worker_lost=lambda worker: self.dispatcher.on_worker_lost(worker),
            on_dropped=self.metrics.message_dropped,
        )
        self.dispatcher = Dispatcher(
            self.view,
            LongestPrefixPolicy(policy_settings(RouterConfig(local_prefill_max_tokens=LOCAL_MAX_TOKENS))),
            self.metrics,
            self.clock,
        )
        self.queue = RequestQueue(
            self.dispatcher,
            self.metrics,
            self.clock,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_wait_ms=MAX_WAIT_MS,
            timer=self.timers,
        )

    def _connect(
        self, record: WorkerRecord, on_message: Callable[[Envelope], None], disconnect: Callable[[], None]
    ) -> RecordingConnection:
        bench = self

        class Logged(RecordingConnection):
            def send(self, message: Message) -> None:
                super().send(message)
                bench.log.append((record.id, message))

        self.connections[record.id] = Logged(record, on_message, disconnect)
        return self.connections[record.id]

    # --- the cluster ---

    def workers(self, **incarnations: int) -> None:
        """These workers are registered now, and ready: p0 prefills, all others decode."""
        records = [
            worker_record(name, _role(name), number, model=model_identity(max_model_len=4096))
            for name, number in incarnations.items()
        ]
        self.view.update(members_of(*records))
        for name in incarnations:
            self.report(name)

    def report(self, worker: str, state: str = "ready") -> None:
        self.say(worker, LoadUpdate(load=load_report(state=state)))

    def say(self, worker: str, message: Message) -> None:
        self.connections[worker].answer(message)

    def disconnect(self, worker: str) -> None:
        """The connection to it breaks."""
        self.connections[worker].disconnect()

    def lands(self, worker: str, prompt: Sequence[int], num_blocks: int) -> None:
        """That many of the prompt's leading blocks are in the worker's prefix cache now."""
        hashes = hash_blocks(prompt, BLOCK_SIZE, root_hash("f" * 64, BLOCK_SIZE))
        self.say(worker, KvEvents(sequence=0, snapshot=True))
        self.say(worker, KvEvents(sequence=1, stored=hashes[:num_blocks]))

    # --- requests ---

    def start(
        self,
        *request_ids: str,
        prompt: Sequence[int] = (1, 2, 3),
        priority: int = 0,
        timeout_ms: float = TIMEOUT_MS,
    ) -> Generation:
        """One generation with a sequence per id."""
        requests = [
            SequenceRequest(
                request_id=request_id,
                spec=SequenceSpec(
                    prompt_token_ids=list(prompt),
                    sampling=SamplingParams(max_tokens=10, seed=9),
                    priority=priority,
                ),
                model=model_identity().name,
                is_explained=True,
            )
            for request_id in request_ids or ("r",)
        ]
        return self.queue.start(requests, timeout_ms=timeout_ms)

    def tokens(
        self, worker: str, *token_ids: int, attempt: int = 0, request_id: str = "r", **fields: Any
    ) -> None:
        output = TokenOutput(key=RequestKey(request_id, attempt), token_ids=list(token_ids), **fields)
        self.say(worker, TokenBatch(outputs=[output]))

    def fails(
        self, worker: str, code: str, *, attempt: int = 0, culprit: str = "", retryable: bool = True
    ) -> None:
        """The decode worker ends the request with an error, which may name another worker."""
        error = RequestError(code=code, message="it failed", retryable=retryable, worker=culprit)
        self.tokens(worker, attempt=attempt, finish_reason="error", error=error)

    # --- what came of it ---

    def sent(self, kind: type[Message]) -> list[tuple[str, Any]]:
        return [(worker, message) for worker, message in self.log if isinstance(message, kind)]

    def generates(self) -> list[tuple[str, int, str | None]]:
        """Worker, attempt and prefill worker of each dispatch."""
        return [(worker, one.key.attempt, one.prefill_worker) for worker, one in self.sent(Generate)]

    def prefill_tokens(self, worker: str) -> int:
        """What the policy sees of a worker's outstanding prefills."""
        view = self.view.state.get(worker)
        assert view is not None
        return int(self.view.state.columns.prefill_tokens[view.slot])

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"leadout_router_{name}", labels) or 0.0


def _role(name: str) -> Role:
    return "prefill" if name.startswith("p") else "decode"


def plan_of(generation: Generation) -> Plan:
    (plan,) = generation.plans
    assert plan is not None
    return plan


async def received(generation: Generation) -> list[TokenOutput]:
    outputs = await asyncio.wait_for(generation.next(), 5)
    return [output for _, output in outputs]


def token_ids(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
