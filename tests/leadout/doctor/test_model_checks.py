"""The configured model, and whether it fits into memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config.settings import EngineConfig, LeadoutConfig, ModelConfig
from leadout.doctor.check import Status
from leadout.doctor.model_checks import check_model, judge_memory, model_sizes
from leadout.doctor.system_files import MemoryState
from model_files.model_source import resolve_model

_GIB = 1024**3


def _config(source: str, **engine: int) -> LeadoutConfig:
    return LeadoutConfig(model=ModelConfig(source=source), engine=EngineConfig(**engine))  # type: ignore[arg-type]


def test_the_bundled_model() -> None:
    model, memory = check_model(LeadoutConfig(), num_workers=1)
    assert model.status == "ok"
    assert Path(model.data["path"]).is_file()
    assert memory.data["kv_cache_bytes"] == 512 * 1024**2


def test_its_sizes_are_those_of_the_engine() -> None:
    config = LeadoutConfig(model=ModelConfig(dtype="float32"))
    weight_bytes, block_bytes = model_sizes(resolve_model(config.model.source), config)
    assert weight_bytes == 134_515_008 * 4  # SmolLM2-135M's parameters; its output layer is its embedding
    assert block_bytes == 30 * 2 * 3 * 64 * 16 * 4  # layers, K and V, heads, head size, tokens, bytes


def test_a_missing_model() -> None:
    (finding,) = check_model(_config("/no/such/model.gguf"), num_workers=1)
    assert finding.status == "failed"
    assert "/no/such/model.gguf" in finding.seen


def test_a_model_of_hugging_face_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (finding,) = check_model(_config("some-org/some-model"), num_workers=1)
    assert finding.status == "warning"
    assert "hf download some-org/some-model" in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_the_engine_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["NoSuchModel"], "model_type": "none"})
    )
    model, memory = check_model(_config(str(tmp_path)), num_workers=1)
    assert model.status == "ok"
    assert memory.status == "failed"
    assert "NoSuchModel" in memory.seen or "none" in memory.seen


@pytest.mark.parametrize(
    ("available", "kv_cache", "num_workers", "status", "hint"),
    [
        (4, 1, 1, "ok", ""),
        (4, 1, 2, "warning", "local.prefill"),
        (2, 1, 1, "failed", "free 0.5 GiB"),
        (4, 0, 1, "failed", "engine.kv_cache_memory to at least 2MiB"),
    ],
)
def test_memory(available: int, kv_cache: int, num_workers: int, status: Status, hint: str) -> None:
    finding = judge_memory(
        MemoryState(total=8 * _GIB, available=available * _GIB, limit=None, used=None),
        weight_bytes=_GIB,
        kv_cache_bytes=kv_cache * _GIB,
        block_bytes=1024**2,
        block_size=16,
        num_workers=num_workers,
    )
    assert finding.status == status
    assert hint in finding.remedy


def test_tokens_do_not_count_the_block_that_holds_none() -> None:
    finding = judge_memory(
        MemoryState(total=8 * _GIB, available=8 * _GIB, limit=8 * _GIB, used=0),
        weight_bytes=1,
        kv_cache_bytes=5 * 1024,
        block_bytes=1024,
        block_size=16,
        num_workers=1,
    )
    assert finding.data["kv_cache_tokens"] == 64
    assert "in this control group" in finding.seen
