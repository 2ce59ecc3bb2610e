"""Reads a ModelConfig from the config.json (and generation_config.json) of a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    ModelConfigError,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from model_files.end_tokens import end_token_ids

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_ROPE_TYPES = "default, linear, llama3, yarn"


class _Fields:
    """Typed access to one JSON object; every error names the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self.path}: {self._prefix}{key} {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"is {value!r}; an integer is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, f"is {value!r}; a number is expected")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}; true or false is expected")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.error(key, f"is {value!r}; a token id or a list of them is expected")
        return tuple(ids)

    def table(self, key: str) -> _Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}; an object is expected")
        return _Fields(self.path, value, f"{self._prefix}{key}.")


def hf_model_config(folder: Path) -> ModelConfig:
    """The configuration of the model in ``folder``.

    Raises ModelConfigError for an architecture or a feature that is not implemented, and for fields that are
    missing or of the wrong type.
    """
    fields = _read_json(folder / "config.json")
    architecture = _architecture(fields)
    _refuse_unimplemented(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if num_heads < 1:
        raise fields.error("num_attention_heads", f"is {num_heads}; it must be at least 1")
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} attention heads")
    max_position = fields.integer("max_position_embeddings")
    attention_bias = fields.boolean("attention_bias", False)
    bos_ids = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(fields, max_position),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        attention_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(fields, architecture),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=end_token_ids(folder),
    )


def _read_json(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return _Fields(path, values)


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise fields.error(
            "architectures",
            f"is {names!r}; exactly one of {', '.join(SUPPORTED_ARCHITECTURES)} is implemented",
        )
    return str(names[0])


def _refuse_unimplemented(fields: _Fields) -> None:
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"{fields.values['hidden_act']!r} is not implemented; silu is")
    if fields.values.get("quantization_config") is not None:
        method = fields.values["quantization_config"]
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise fields.error("quantization_config", f"{name!r} is not implemented; use plain weights or GGUF")
    for key in ("partial_rotary_factor",):
        if fields.number(key, 1.0) != 1.0:
            raise fields.error(key, f"{fields.values[key]!r} is not implemented; 1.0 is")


def _rope(fields: _Fields, max_position: int) -> RopeConfig:
    """Both spellings: ``rope_parameters``, or the older ``rope_theta`` with ``rope_scaling``."""
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    theta = fields.number("rope_theta", 10_000.0)
    if table is None:
        return RopeConfig(theta)
    return RopeConfig(table.number("rope_theta", theta), _rope_scaling(table, max_position))


def _rope_scaling(table: _Fields, max_position: int) -> RopeScaling | None:
    if table.number("partial_rotary_factor", 1.0) != 1.0:
        raise table.error("partial_rotary_factor", "is not implemented; 1.0 is")
    kind = table.values.get("rope_type", table.values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_factor(table))
    if kind == "llama3":
        return Llama3Scaling(
            factor=_factor(table),
            low_freq_factor=table.number("low_freq_factor"),
            high_freq_factor=table.number("high_freq_factor"),
            original_max_position=table.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return YarnScaling(
            factor=_factor(table),
            original_max_position=table.integer("original_max_position_embeddings", max_position),
            beta_fast=table.number("beta_fast", 32.0),
            beta_slow=table.number("beta_slow", 1.0),
            attention_factor=table.optional_number("attention_factor"),
            mscale=table.optional_number("mscale"),
            mscale_all_dim=table.optional_number("mscale_all_dim"),
            truncate=table.boolean("truncate", True),
        )
    raise table.error("rope_type", f"{kind!r} is not implemented; implemented are {_ROPE_TYPES}")


def _factor(table: _Fields) -> float:
    factor = table.number("factor")
    if factor < 1.0:
        raise table.error("factor", f"is {factor}; it must be at least 1")
    return factor


def _sliding_window(fields: _Fields, architecture: str) -> int | None:
    """The window in tokens, None where the model does not use one. Qwen names a window it does not use."""
    window = fields.values.get("sliding_window")
    if architecture.startswith("Qwen") and not fields.boolean("use_sliding_window", False):
        return None
    if architecture == "LlamaForCausalLM" or window is None:
        return None
    return fields.integer("sliding_window")
