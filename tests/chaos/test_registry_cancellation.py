"""A task that follows the registry ends when it is cancelled, whenever that is: else its process hangs."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.config.settings import RegistryConfig
from cluster.registry import Registry
from leadout.local.embedded_registry import EmbeddedRegistry

pytestmark = pytest.mark.processes


async def test_a_cancelled_watch_ends() -> None:
    server = EmbeddedRegistry()
    await asyncio.to_thread(server.start)
    registry = Registry(RegistryConfig(url=server.url, heartbeat_ms=50, lease_ms=500))
    rng = random.Random(1)

    async def watch() -> None:
        async for _members in registry.watch():
            pass

    try:
        for _ in range(200):
            task = asyncio.create_task(watch())
            for _ in range(rng.randint(1, 60)):
                await asyncio.sleep(0)
            task.cancel()
            _done, pending = await asyncio.wait([task], timeout=60)
            assert not pending
    finally:
        await registry.close()
        await asyncio.to_thread(server.stop)
