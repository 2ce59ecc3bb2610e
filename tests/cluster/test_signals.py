"""A process hears of its end also while its loop is behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from cluster.signals import on_signal


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


async def test_a_signal_is_heard_while_many_calls_wait() -> None:
    heard = asyncio.Event()
    on_signal(signal.SIGUSR1, heard.set)
    loop = asyncio.get_running_loop()
    for _ in range(100_000):  # as from other threads: fills the pipe that wakes the loop
        loop.call_soon_threadsafe(lambda: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(heard.wait(), 60)


async def test_a_signal_wakes_a_loop_that_waits() -> None:
    heard = asyncio.Event()
    on_signal(signal.SIGUSR1, heard.set)
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, os.kill, os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(heard.wait(), 60)


def test_a_signal_after_the_loop_does_nothing() -> None:
    async def install() -> None:
        on_signal(signal.SIGUSR1, lambda: None)

    asyncio.run(install())
    os.kill(os.getpid(), signal.SIGUSR1)
