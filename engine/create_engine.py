"""Builds an engine from a model on disk and its settings."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from dataclasses import dataclass

from cluster.block_hash import root_hash
from cluster.kv_layout import KvLayout
from engine.engine import Engine
from engine.kv_cache_storage import KvCacheStorage
from engine.model_runner import ModelRunner, kv_layout
from engine.models.config import ModelConfig
from engine.models.load import load_model, load_model_config
from engine.ops.backend import Backend
from engine.ops.number_formats import (
    NumberFormat,
    WeightRangeError,
    number_formats,
    resolve_kv_cache_dtype,
)
from engine.ops.registry import backend_class
from engine.scheduler.config import SchedulerConfig
from model_files.model_source import ModelSource, model_fingerprint

logger = logging.getLogger(__name__)

_MIN_TOKENS = 2  # a prompt of one token and its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedEngine:
    """An engine and what the rest of its process must know of it."""

    engine: Engine
    storage: KvCacheStorage
    model_config: ModelConfig
    model_fingerprint: str
    kv_layout: KvLayout
    number_format: NumberFormat
    kernels: str  # for people

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence: the model's or the configured limit, or what the KV cache holds."""
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to one less than this."""
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model's files name them."""
        return self.model_config.eos_token_ids


def create_engine(
    source: ModelSource,
    *,
    backend: str,
    dtype: str,
    max_model_len: int | None,
    block_size: int,
    kv_cache_memory: int,
    kv_cache_dtype: str,
    scheduler_config: SchedulerConfig,
    prefix_caching: bool,
) -> CreatedEngine:
    """Loads the model and allocates its KV cache of at most ``kv_cache_memory`` bytes.

    ``backend`` is a name that ``backend_class`` knows. ``dtype`` is float32, float16, bfloat16, or auto:
    float16 where the backend has kernels for it and the weights are within its range, else float32.
    ``max_model_len`` and ``block_size`` are in tokens; where the KV cache holds less than ``max_model_len``
    (None: all that the model allows), sequences end at what it holds. ``kv_cache_dtype`` is float32, float16,
    bfloat16, or auto: the weights'.

    Raises ValueError where the settings and the model do not go together, ModelNotFoundError, OSError, and
    the loader's errors on files it cannot read.
    """
    chosen = backend_class(backend)
    *preferred, last = number_formats(dtype, has_float16=chosen.has_float16())
    create = functools.partial(
        _create,
        source,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        scheduler_config=scheduler_config,
        prefix_caching=prefix_caching,
    )
    for number_format in preferred:
        try:
            return create(chosen(number_format))
        except WeightRangeError as error:
            logger.warning("%s instead of %s: %s", last.name, number_format.name, error)
    return create(chosen(last))


def _create(
    source: ModelSource,
    backend: Backend,
    *,
    max_model_len: int | None,
    block_size: int,
    kv_cache_memory: int,
    kv_cache_dtype: str,
    scheduler_config: SchedulerConfig,
    prefix_caching: bool,
) -> CreatedEngine:
    dtype = resolve_kv_cache_dtype(kv_cache_dtype, backend.number_format)
    layout = kv_layout(load_model_config(source), block_size, dtype)
    num_blocks = KvCacheStorage.num_blocks_for(layout, kv_cache_memory)
    min_blocks = 1 + -(-_MIN_TOKENS // block_size)  # with the null block, which holds no sequence
    if num_blocks < min_blocks:
        raise ValueError(
            f"kv_cache_memory is {kv_cache_memory} bytes, but one block of {block_size} tokens of this model "
            f"takes {layout.block_bytes} bytes in {layout.dtype}: give it at least "
            f"{min_blocks * layout.block_bytes}"
        )
    model = load_model(source, backend=backend, max_model_len=max_model_len)
    _return_free_memory()
    try:
        storage = KvCacheStorage(layout, num_blocks, backend.device)
    except RuntimeError as error:  # how torch says that there is not enough memory
        raise ValueError(
            f"kv_cache_memory is {kv_cache_memory} bytes, and this machine cannot allocate them: {error}"
        ) from error
    fingerprint = model_fingerprint(source)
    engine = Engine(
        ModelRunner(model, storage),
        scheduler_config=scheduler_config,
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=model.config.eos_token_ids,
        max_model_len=model.max_model_len,
        vocab_size=model.config.vocab_size,
        hash_root=functools.partial(root_hash, fingerprint, block_size),
        prefix_caching=prefix_caching,
    )
    return CreatedEngine(
        engine=engine,
        storage=storage,
        model_config=model.config,
        model_fingerprint=fingerprint,
        kv_layout=layout,
        number_format=backend.number_format,
        kernels=backend.kernels,
    )


def _return_free_memory() -> None:
    """Gives what dequantisation left in the C library's heap back to the system (about 50 MB)."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
