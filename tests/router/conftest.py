"""A router in this process on a real port, and workers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from cluster.config.settings import RouterConfig
from cluster.members import WorkerRecord
from cluster.messages import Envelope
from cluster.rpc import RpcConnection
from model_files.model_source import BUNDLED_MODEL, resolve_model
from router.app import create_app
from router.http.server import HttpServer, bind_listener, http_limits, listener_url
from router.served_model import RouterModel
from router.services import RouterServices, build_services
from router.text_model_files import load_text_model_of, load_text_models
from tests.router.factories import members_of, model_identity
from tests.router.scripted_worker import ScriptedWorker, until
from text_pipeline.text_model import TextModel
from text_pipeline.tokenizer import Tokenizer

MODEL = "test-model"


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return load_text_model_of(resolve_model(BUNDLED_MODEL))


@pytest.fixture
def tokenizer(text_model: TextModel) -> Tokenizer:
    return text_model.tokenizer


class RunningRouter:
    """A serving router, its clients, and the workers it knows."""

    def __init__(self, services: RouterServices, url: str) -> None:
        self.services = services
        self.url = url
        self.workers: list[ScriptedWorker] = []
        self.http = httpx.AsyncClient(base_url=url, timeout=30)
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30)

    async def add_worker(self, worker: ScriptedWorker) -> ScriptedWorker:
        """Start a worker, make it a member, and wait until the router heard its load."""
        await worker.start()
        self.workers.append(worker)
        self.set_members(self.workers)

        def has_reported() -> bool:
            view = self.services.view.state.get(worker.id)
            return view is not None and view.load is not None and view.kv_sequence is not None

        await until(has_reported, f"the first load report of {worker.id}")
        return worker

    def set_members(self, workers: list[ScriptedWorker]) -> None:
        """What the registry says."""
        self.services.view.update(members_of(*(worker.record for worker in workers)))

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST a JSON body to ``/v1``."""
        return await self.http.post(f"/v1/{path}", json=body, **options)

    async def metric(self, line: str) -> float:
        """The value of one line of ``/metrics``; 0 where it is absent."""
        text = (await self.http.get("/metrics")).text
        values = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.startswith(line + " ")]
        return float(values[0]) if values else 0.0

    def assert_idle(self) -> None:
        """Nothing of any request is left behind."""
        assert len(self.services.dispatcher.in_flight) == 0
        assert self.services.queue.line.num_admitted == 0
        assert all(view.num_in_flight == 0 for view in self.services.view.state.workers)


StartRouter = Callable[..., Any]


@pytest.fixture
async def start_router(text_model: TextModel) -> AsyncIterator[StartRouter]:
    """``await start_router(worker, ..., max_n=4)`` gives a RunningRouter with these workers and settings.

    ``http``: fields of HttpLimits; ``app``: further arguments of create_app; ``models``: their names, all
    with one text side.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *workers: ScriptedWorker,
            http: dict[str, Any] | None = None,
            app: dict[str, Any] | None = None,
            models: tuple[str, ...] = (MODEL,),
            **config: Any,
        ) -> RunningRouter:
            return await stack.enter_async_context(
                _running(dict.fromkeys(models, text_model), workers, config, http or {}, app or {})
            )

        yield start


@contextlib.asynccontextmanager
async def _running(
    text_models: dict[str, TextModel],
    workers: tuple[ScriptedWorker, ...],
    config: dict[str, Any],
    http: dict[str, Any],
    app: dict[str, Any],
) -> AsyncIterator[RunningRouter]:
    def connect(
        record: WorkerRecord, on_message: Callable[[Envelope], None], on_disconnected: Callable[[], None]
    ) -> RpcConnection:
        return RpcConnection(
            record.address,
            sender="router-0",
            incarnation=1,
            on_message=on_message,
            on_disconnected=on_disconnected,
        )

    services = build_services(
        router_id="router-0",
        models={name: RouterModel(text=text) for name, text in text_models.items()},
        load_text_models=functools.partial(
            load_text_models, dict.fromkeys(text_models, resolve_model(BUNDLED_MODEL))
        ),
        config=RouterConfig(**config),
        connect=connect,
    )
    listener = bind_listener("127.0.0.1", 0)
    server = HttpServer(
        create_app(services, **app),
        listener,
        limits=dataclasses.replace(http_limits(RouterConfig()), **http),
        metrics=services.metrics,
        rejections=services.rejections,
        shutdown_grace_s=1,
    )
    serving = asyncio.create_task(server.serve())
    router = RunningRouter(services, listener_url(listener))
    try:
        for worker in workers:
            await router.add_worker(worker)
        yield router
    finally:
        await router.http.aclose()
        await router.openai.close()
        server.stop_accepting()
        services.queue.close_all("shutdown")
        await serving
        await services.body_workers.close()
        services.view.close()
        for worker in router.workers:
            await worker.stop()


@pytest.fixture
def make_worker(tokenizer: Tokenizer) -> Callable[..., ScriptedWorker]:
    """``make_worker("d0", script=…, model={...})``: a worker that serves the test model."""

    def make(worker_id: str = "d0", *, model: dict[str, Any] | None = None, **fields: Any) -> ScriptedWorker:
        identity = model_identity(
            **{"vocab_size": tokenizer.vocab_size, "max_model_len": 256, **(model or {})}
        )
        return ScriptedWorker(worker_id, model=identity, **fields)

    return make
