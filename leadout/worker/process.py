"""One worker process: an engine, a transport, and the roles that use them, from start to clean exit."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time

from cluster.clock import SystemClock
from cluster.config.settings import EngineConfig, LeadoutConfig
from cluster.logging_setup import configure_logging
from cluster.members import Role
from engine.create_engine import create_engine
from engine.scheduler.config import SchedulerConfig
from engine.threads import configure_threads
from leadout.cpu_plan import available_cores
from leadout.worker.host import WorkerHost
from model_files.model_source import resolve_model

logger = logging.getLogger(__name__)


def run_worker(config: LeadoutConfig, role: Role, worker_id: str | None = None) -> int:
    """Serve as a worker that starts with ``role`` until SIGTERM or SIGINT; returns the exit status.

    Raises what is wrong with the configuration or the machine: ValueError, OSError, ModelNotFoundError,
    TransportUnavailableError, RegistryUnavailableError.
    """
    worker_id = worker_id or config.worker.id or f"worker-{socket.gethostname()}-{os.getpid()}"
    configure_logging(config.log, process=worker_id, role=role)
    num_threads = config.engine.num_threads or available_cores()
    configure_threads(num_threads)
    began = time.monotonic()
    source = resolve_model(config.model.source)
    created = create_engine(
        source,
        backend=config.engine.backend,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        block_size=config.engine.block_size,
        kv_cache_memory=config.engine.kv_cache_memory,
        kv_cache_dtype=config.engine.kv_cache_dtype,
        scheduler_config=scheduler_config(config.engine),
        prefix_caching=config.engine.prefix_caching,
    )
    logger.info(
        "loaded %s in %s (%s) in %.1f s; %d KV blocks of %d tokens in %s, "
        "longest sequence %d tokens, %d threads",
        source.path,
        created.number_format.name,
        created.kernels,
        time.monotonic() - began,
        created.storage.num_blocks - 1,
        created.kv_layout.block_size,
        created.kv_layout.dtype,
        created.max_model_len,
        num_threads,
    )
    host = WorkerHost(
        config, role=role, worker_id=worker_id, created=created, source=source, clock=SystemClock()
    )
    return asyncio.run(host.run())


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    """What of the configuration the scheduler asks for."""
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        prefill_policy=config.prefill_order,
        ageing_tokens_per_second=config.ageing_tokens_per_second,
        watermark=config.watermark,
    )
