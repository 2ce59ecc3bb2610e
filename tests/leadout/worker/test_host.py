"""A worker that cannot start: why, and what it leaves behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config.settings import load_config
from cluster.rpc import RpcError
from engine.create_engine import CreatedEngine, create_engine
from leadout.worker.host import WorkerHost
from model_files.model_source import ModelSource
from tests.engine.models.tiny_models import reference_model, save
from tests.engine.scheduler_config import SCHEDULER_CONFIG


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource("hf", save(reference_model("llama"), Path(tmp_path_factory.mktemp("llama"))), "tiny")


@pytest.fixture(scope="module")
def created(source: ModelSource) -> CreatedEngine:
    return create_engine(
        source,
        backend="auto",
        dtype="float32",
        max_model_len=None,
        block_size=16,
        kv_cache_memory=1 << 20,
        kv_cache_dtype="auto",
        scheduler_config=SCHEDULER_CONFIG,
        prefix_caching=True,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A host takes the signals of its process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("setting", "error"), [("port", RpcError), ("metrics_port", OSError)], ids=["messages", "metrics"]
)
def test_a_taken_port_is_named_and_nothing_stays_open(
    source: ModelSource,
    created: CreatedEngine,
    taken_port: int,
    setting: str,
    error: type[Exception],
) -> None:
    threads = set(threading.enumerate())
    config = load_config(
        file=None, overrides={"worker": {setting: taken_port}, "model": {"source": str(source.path)}}
    )
    host = WorkerHost(
        config, role="decode", worker_id="w", created=created, source=source, clock=SystemClock()
    )
    with pytest.raises(error, match="Address already in use"):
        asyncio.run(host.run())
    assert [thread.name for thread in set(threading.enumerate()) - threads] == []
