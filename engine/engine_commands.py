"""Commands to an engine from an event loop, with their failures brought back to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from engine.engine import Engine
from engine.engine_loop import EngineLoop

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]  # runs a function in the caller's loop, from any thread


class EngineCommands:
    """Sends an engine what a worker's event loop wants of it. Commands run in the order they were sent."""

    def __init__(self, engine_loop: EngineLoop, post: Post) -> None:
        self._engine_loop = engine_loop
        self._post = post

    def run(
        self, command: Callable[[Engine], object], on_error: Callable[[BaseException], None] | None = None
    ) -> None:
        """Run ``command`` in the engine's thread between two steps.

        ``on_error`` gets in the event loop what it raises; without it, that is logged. Raises RuntimeError if
        the engine's loop has stopped or failed.
        """

        def done(future: Future[object]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is None:
                return
            if on_error is None:
                logger.error("an engine command failed", exc_info=error)
            else:
                self._post(lambda: on_error(error))

        self._engine_loop.submit(command).add_done_callback(done)
