"""The engine's thread: commands between steps, sleep without work, failure and stop."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch

from cluster.clock import ManualClock, SystemClock
from engine.batch import Batch
from engine.engine import Engine
from engine.engine_commands import EngineCommands
from engine.engine_loop import EngineLoop
from engine.step_result import StepResult
from tests.engine.prefix_runner import greedy, make_engine, new_request, oracle

PROMPT = [3, 1, 4, 1, 5]


class Results:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished = threading.Event()
        self.fail = False

    def __call__(self, result: StepResult) -> None:
        for output in result.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.finished.set()
        if self.fail:
            self.fail = False
            raise ValueError("the listener is broken")


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def loop(results: Results) -> EngineLoop:
    engine, _ = make_engine()
    loop = EngineLoop(engine, results, SystemClock())
    loop.start()
    yield loop
    loop.stop()


def add(name: str) -> object:
    return lambda engine: engine.add_request(new_request(name, PROMPT), 0.0)


def test_a_command_starts_work(loop: EngineLoop, results: Results) -> None:
    loop.submit(add("a")).result(5)  # type: ignore[arg-type]
    assert results.finished.wait(5)
    assert results.tokens["a"] == oracle(PROMPT, greedy())


def test_exceptions_of_commands_and_listeners_end_neither(loop: EngineLoop, results: Results) -> None:
    with pytest.raises(ValueError, match="prompt"):
        loop.submit(lambda engine: engine.add_request(new_request("bad", []), 0.0)).result(5)
    results.fail = True
    loop.submit(add("a")).result(5)  # type: ignore[arg-type]
    assert results.finished.wait(5)
    assert results.tokens["a"] == oracle(PROMPT, greedy())


def test_it_sleeps_without_work(loop: EngineLoop) -> None:
    loop.submit(lambda engine: None).result(5)
    deadline = time.monotonic() + 5
    while not loop.is_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.is_idle


def test_stop_cancels_what_has_not_run(loop: EngineLoop) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(engine: Engine) -> None:
        entered.set()
        leave.wait(5)

    loop.submit(block)
    assert entered.wait(5)
    late = loop.submit(lambda engine: None)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    leave.set()
    stopper.join(5)
    with pytest.raises((CancelledError, RuntimeError)):
        late.result(5)
    with pytest.raises(RuntimeError, match="stopped"):
        loop.submit(lambda engine: None)


def test_engine_commands_bring_errors_back(loop: EngineLoop) -> None:
    posted: list[object] = []
    arrived = threading.Event()

    def post(function: object) -> None:
        posted.append(function)
        arrived.set()

    errors: list[BaseException] = []
    EngineCommands(loop, post).run(
        lambda engine: engine.add_request(new_request("bad", []), 0.0), errors.append
    )
    assert arrived.wait(5)
    assert errors == []  # not in the engine's thread
    posted[0]()  # type: ignore[operator]
    assert isinstance(errors[0], ValueError)


def test_a_step_that_takes_long_shows_since_when() -> None:
    engine, runner = make_engine()
    entered, go_on = threading.Event(), threading.Event()
    compute = runner.forward

    def forward(batch: Batch) -> torch.Tensor:
        entered.set()
        assert go_on.wait(20)
        return compute(batch)

    runner.forward = forward  # type: ignore[method-assign]
    loop = EngineLoop(engine, lambda result: None, ManualClock(monotonic=42.0))
    loop.start()
    try:
        assert loop.step_began_at is None
        loop.submit(add("a")).result(5)  # type: ignore[arg-type]
        assert entered.wait(5)
        assert loop.step_began_at == 42.0
        go_on.set()
        while not loop.is_idle:
            time.sleep(0.001)
        assert loop.step_began_at is None
    finally:
        go_on.set()
        loop.stop()
