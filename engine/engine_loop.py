"""The thread in which an engine lives."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from cluster.clock import Clock
from engine.engine import Engine
from engine.step_result import StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Command = tuple[Callable[[Engine], Any], "Future[Any]"]

_BLOCKED_RETRY_S = 0.05  # requests wait but none can run: only ageing may change that without a command


class EngineLoop:
    """Runs commands and steps in one thread, so that nobody else ever touches the engine.

    ``on_result`` is called in that thread after each step that did something; it must not block, and must not
    wait for a future of ``submit``. An exception from it is logged, and the loop goes on. Without work the
    thread sleeps until the next command.
    """

    def __init__(self, engine: Engine, on_result: Callable[[StepResult], None], clock: Clock) -> None:
        self._engine = engine
        self._on_result = on_result
        self._clock = clock
        self._commands: deque[_Command] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._is_idle = True
        self._step_began_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread. Commands submitted before wait for it."""
        self._thread.start()

    def submit(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs ``function(engine)`` between two steps; the future has its result or exception.

        May be called from any thread. Raises RuntimeError if the loop has stopped or failed.
        """
        future: Future[T] = Future()
        with self._condition:
            if self._failure is not None:
                raise RuntimeError(f"the engine loop has failed: {self._failure!r}") from self._failure
            if self._stopping:
                raise RuntimeError("the engine loop is stopped")
            self._commands.append((function, future))
            self._condition.notify()
        return future

    def stop(self) -> None:
        """Ends the thread after the step in progress. Commands that have not run are cancelled."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._cancel_commands()

    @property
    def is_idle(self) -> bool:
        """Whether the loop sleeps because nothing can be done now: no progress is then no fault."""
        return self._is_idle

    @property
    def step_began_at(self) -> float | None:
        """When the step that runs now began, on the loop's clock; None between steps."""
        return self._step_began_at

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if a fault in the engine did. It must be built anew then."""
        return self._failure

    def _run(self) -> None:
        try:
            did_something = True
            while self._wait_for_work(blocked=not did_something):
                self._run_commands()
                did_something = False
                if self._engine.has_work():
                    self._step_began_at = now = self._clock.monotonic()
                    result = self._engine.step(now)
                    self._step_began_at = None
                    did_something = not result.is_empty
                    if did_something:
                        self._deliver(result)
        except BaseException as failure:
            logger.exception("the engine loop has failed")
            with self._condition:
                self._failure = failure
            self._cancel_commands()

    def _wait_for_work(self, *, blocked: bool) -> bool:
        """Sleeps until there is something to do. Returns False when the loop is to end."""
        with self._condition:
            self._is_idle = True
            if blocked and not self._commands and not self._stopping and self._engine.has_work():
                self._condition.wait(_BLOCKED_RETRY_S)
            while not (self._commands or self._stopping or self._engine.has_work()):
                self._condition.wait()
            self._is_idle = False
            return not self._stopping

    def _run_commands(self) -> None:
        with self._condition:
            commands, self._commands = self._commands, deque()
        for function, future in commands:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(self._engine)
            except BaseException as error:  # whatever it is belongs to the caller, not to this thread
                future.set_exception(error)
            else:
                future.set_result(result)

    def _deliver(self, result: StepResult) -> None:
        try:
            self._on_result(result)
        except Exception:
            logger.exception("the receiver of step results failed")

    def _cancel_commands(self) -> None:
        with self._condition:
            commands, self._commands = self._commands, deque()
        for _, future in commands:
            future.cancel()
