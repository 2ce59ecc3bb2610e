"""Reads a ModelConfig from the config.json of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

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
from model_files.json_files import read_json

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
T = TypeVar("T")

_ROPE_TYPES = "default, linear, llama3, yarn"


class _Architectures(msgspec.Struct):
    """Read first: other architectures have other fields."""

    architectures: list[str] | None = None


class _Rope(msgspec.Struct):
    """``rope_parameters``, or ``rope_scaling`` as older files call it."""

    rope_type: str | None = None
    type: str | None = None  # as older files call it
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


class _Quantization(msgspec.Struct):
    quant_method: str | None = None


class _Config(msgspec.Struct):
    """config.json. Null counts as absent."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    hidden_act: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    quantization_config: _Quantization | None = None


def hf_model_config(folder: Path) -> ModelConfig:
    """The configuration of the model in ``folder``.

    Raises ModelConfigError for an architecture or a feature that is not implemented, and ModelFileError for
    fields that are missing or of the wrong type.
    """
    path = folder / "config.json"
    architecture = _architecture(path)
    config = read_json(path, _Config)
    _refuse_unimplemented(path, config)
    num_heads, hidden_size = config.num_attention_heads, config.hidden_size
    if num_heads < 1:
        raise ModelConfigError(f"{path}: num_attention_heads is {num_heads}; it must be at least 1")
    if config.head_dim is None and hidden_size % num_heads:
        raise ModelConfigError(
            f"{path}: hidden_size {hidden_size} is not a multiple of {num_heads} attention heads"
        )
    attention_bias = bool(config.attention_bias)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=_or(config.num_key_value_heads, num_heads),
        head_dim=_or(config.head_dim, hidden_size // num_heads),
        intermediate_size=config.intermediate_size,
        rms_norm_eps=_or(config.rms_norm_eps, 1e-6),
        max_position=config.max_position_embeddings,
        rope=_rope(path, config),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        attention_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=bool(config.mlp_bias),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(config, architecture),
        eos_token_ids=end_token_ids(folder),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _architecture(path: Path) -> str:
    names = read_json(path, _Architectures).architectures
    if names is None or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelConfigError(
            f"{path}: architectures is {names!r}; exactly one of {', '.join(SUPPORTED_ARCHITECTURES)} is "
            "implemented"
        )
    return names[0]


def _refuse_unimplemented(path: Path, config: _Config) -> None:
    if _or(config.hidden_act, "silu") != "silu":
        raise ModelConfigError(f"{path}: hidden_act {config.hidden_act!r} is not implemented; silu is")
    if config.quantization_config is not None:
        method = config.quantization_config.quant_method
        raise ModelConfigError(
            f"{path}: quantization_config {method!r} is not implemented; use plain weights or GGUF"
        )
    for factor in (config.partial_rotary_factor, _rope_fields(config)[1].partial_rotary_factor):
        if _or(factor, 1.0) != 1.0:
            raise ModelConfigError(f"{path}: partial_rotary_factor {factor} is not implemented; 1.0 is")


def _rope_fields(config: _Config) -> tuple[str, _Rope]:
    """The table of RoPE parameters and its name; an empty one where there is none."""
    if config.rope_parameters is not None:
        return "rope_parameters", config.rope_parameters
    return "rope_scaling", config.rope_scaling or _Rope()


def _rope(path: Path, config: _Config) -> RopeConfig:
    """Both spellings: ``rope_parameters``, or the older ``rope_theta`` with ``rope_scaling``."""
    name, rope = _rope_fields(config)
    theta = _or(rope.rope_theta, _or(config.rope_theta, 10_000.0))
    return RopeConfig(theta, _rope_scaling(f"{path}: {name}", rope, config.max_position_embeddings))


def _rope_scaling(place: str, rope: _Rope, max_position: int) -> RopeScaling | None:
    def required(name: str) -> float:
        value: float | None = getattr(rope, name)
        if value is None:
            raise ModelConfigError(f"{place}.{name} is missing")
        return value

    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelConfigError(
            f"{place}.rope_type {kind!r} is not implemented; implemented are {_ROPE_TYPES}"
        )
    factor = required("factor")
    if factor < 1.0:
        raise ModelConfigError(f"{place}.factor is {factor}; it must be at least 1")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        return Llama3Scaling(
            factor=factor,
            low_freq_factor=required("low_freq_factor"),
            high_freq_factor=required("high_freq_factor"),
            original_max_position=int(required("original_max_position_embeddings")),
        )
    return YarnScaling(
        factor=factor,
        original_max_position=_or(rope.original_max_position_embeddings, max_position),
        beta_fast=_or(rope.beta_fast, 32.0),
        beta_slow=_or(rope.beta_slow, 1.0),
        attention_factor=rope.attention_factor,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
        truncate=_or(rope.truncate, True),
    )


def _sliding_window(config: _Config, architecture: str) -> int | None:
    """The window in tokens, None where the model does not use one. Qwen names a window it does not use."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture.startswith("Qwen") and not config.use_sliding_window:
        return None
    return config.sliding_window
