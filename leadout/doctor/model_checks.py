"""The configured model, and whether it and its KV cache fit into memory."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from pathlib import Path

from cluster.config.settings import LeadoutConfig
from cluster.config.values import format_size
from leadout.doctor.check import Finding
from leadout.doctor.system_files import MemoryState, memory_state
from model_files.model_source import ModelNotFoundError, ModelSource, resolve_model

# Interpreter, torch, buffers and the activations of one step: nearly 0.4 GiB with the bundled model.
_WORKER_OVERHEAD = 512 * 1024**2
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_MIN_BLOCKS = 2  # as the engine asks for


def check_model(config: LeadoutConfig, *, num_workers: int, root: Path = Path("/")) -> list[Finding]:
    """Finds the model, reads its shape, and adds up what ``num_workers`` workers need on this machine."""
    try:
        source = _cached_from_hub(config.model.source) or resolve_model(config.model.source)
    except _NotInCacheError as error:
        remedy = f"fetch it beforehand, so that workers start at once: hf download {config.model.source}"
        return [Finding("warning", str(error), remedy)]
    except ModelNotFoundError as error:
        return [
            Finding("failed", str(error), "set model.source (or --model) to a model that is on this machine")
        ]
    found = Finding(
        "ok", f"{source.default_name}: {source.path}", data={"kind": source.kind, "path": str(source.path)}
    )
    try:
        weight_bytes, block_bytes = model_sizes(source, config)
    except ImportError as error:
        return [found, Finding("skipped", f"torch is missing, see there: {error}", about="memory")]
    except (ValueError, OSError) as error:
        remedy = "choose a model that this version can run, or another model.dtype or max_model_len"
        return [found, Finding("failed", str(error), remedy, about="memory")]
    return [
        found,
        judge_memory(
            memory_state(root),
            weight_bytes=weight_bytes,
            kv_cache_bytes=config.engine.kv_cache_memory,
            block_bytes=block_bytes,
            block_size=config.engine.block_size,
            num_workers=num_workers,
        ),
    ]


class _NotInCacheError(Exception):
    """A Hugging Face id whose files are not on this machine: a look must not download them."""


def _cached_from_hub(source: str) -> ModelSource | None:
    """The files of a Hugging Face id; None where ``source`` is something else. Raises _NotInCacheError."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not _HUB_ID.fullmatch(source) or Path(source).exists() or source.lower().endswith(".gguf"):
        return None
    try:
        cached = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        return None
    if isinstance(cached, str):
        return ModelSource("hf", Path(cached).parent, source)
    raise _NotInCacheError(
        f"{source} is not in the Hugging Face cache ({constants.HF_HUB_CACHE}): each machine downloads it "
        "when its first worker starts"
    )


def model_sizes(source: ModelSource, config: LeadoutConfig) -> tuple[int, int]:
    """Bytes of the weights in the first format that ``model.dtype`` allows, and of one KV block.

    Raises ImportError without torch, and ValueError or OSError where the engine cannot run the model.
    """
    from engine.model_runner import kv_layout
    from engine.models.load import load_model_config
    from engine.ops.number_formats import number_formats, resolve_kv_cache_dtype
    from engine.ops.registry import backend_class
    from engine.weights.gguf_weights import GgufWeights
    from engine.weights.safetensors_weights import SafetensorsWeights
    from model_files.gguf import GgufFile

    has_float16 = backend_class(config.engine.backend).has_float16()
    number_format = number_formats(config.model.dtype, has_float16=has_float16)[0]
    model = load_model_config(source)
    model.resolve_max_model_len(config.model.max_model_len)
    cache_dtype = resolve_kv_cache_dtype(config.engine.kv_cache_dtype, number_format)
    layout = kv_layout(model, config.engine.block_size, cache_dtype)
    with contextlib.ExitStack() as opened:
        weights: GgufWeights | SafetensorsWeights
        if source.kind == "gguf":
            file = GgufFile.open(source.path)
            opened.enter_context(contextlib.closing(file))
            weights = GgufWeights(file, model)
        else:
            weights = SafetensorsWeights(source.path)
            opened.enter_context(contextlib.closing(weights))
        num_parameters = _count(weights.shape(name) for name in weights.names())
    return num_parameters * number_format.weights.itemsize, layout.block_bytes


def judge_memory(
    memory: MemoryState,
    *,
    weight_bytes: int,
    kv_cache_bytes: int,
    block_bytes: int,
    block_size: int,
    num_workers: int,
) -> Finding:
    """Whether one worker fits, and all that ``leadout serve`` starts. Each has its own weights."""
    worker_bytes = weight_bytes + kv_cache_bytes + _WORKER_OVERHEAD
    num_blocks = kv_cache_bytes // block_bytes
    num_tokens = max(0, num_blocks - 1) * block_size  # block 0 holds no sequence
    group = "" if memory.limit is None else " in this control group"
    seen = (
        f"{_gib(memory.available)} of {_gib(memory.limit or memory.total)} GiB available{group}; a worker "
        f"needs about {_gib(worker_bytes)} GiB: weights {_gib(weight_bytes)}, KV cache "
        f"{_gib(kv_cache_bytes)} ({num_tokens:,} tokens), rest {_gib(_WORKER_OVERHEAD)}"
    )
    data = {
        "available_bytes": memory.available,
        "total_bytes": memory.total,
        "limit_bytes": memory.limit,
        "weight_bytes": weight_bytes,
        "kv_cache_bytes": kv_cache_bytes,
        "kv_cache_tokens": num_tokens,
        "worker_bytes": worker_bytes,
        "num_workers": num_workers,
    }
    if num_blocks < _MIN_BLOCKS:
        least = format_size(_MIN_BLOCKS * block_bytes)
        return Finding(
            "failed",
            f"{seen}: too small a KV cache",
            f"set engine.kv_cache_memory to at least {least}",
            data,
            "memory",
        )
    if worker_bytes > memory.available:
        remedy = (
            f"free {(worker_bytes - memory.available) / 2**30:.1f} GiB, lower engine.kv_cache_memory, or "
            "choose a smaller model"
        )
        return Finding("failed", seen, remedy, data, "memory")
    if num_workers * worker_bytes > memory.available:
        missing = (num_workers * worker_bytes - memory.available) / 2**30
        return Finding(
            "warning",
            f"{seen}; the {num_workers} workers of `leadout serve` do not fit",
            f"free {missing:.1f} GiB, or lower engine.kv_cache_memory, local.prefill or local.decode",
            data,
            "memory",
        )
    if num_workers > 1:
        seen += f"; {num_workers} of them fit"
    return Finding("ok", seen, data=data, about="memory")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)
