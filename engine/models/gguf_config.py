"""Reads a ModelConfig from a GGUF file's metadata."""

from __future__ import annotations

import math
import struct

from engine.models.config import (
    FrequencyDivisors,
    LinearScaling,
    ModelConfig,
    ModelConfigError,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from model_files.end_tokens import end_token_ids
from model_files.gguf import GgufFile, GgufValue

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_DIVISORS_TENSOR = "rope_freqs.weight"


class _Metadata:
    """Typed access to a file's metadata; every error names the file and the key."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def error(self, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self._file.path}: {problem}")

    def _get(self, key: str) -> GgufValue | None:
        return self._file.metadata.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        if value is None:
            if default is None:
                raise self.error(f"the metadata key {key!r} is missing")
            return default
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # some converters write one number per layer
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"the metadata key {key!r} is {value!r}; one integer is expected")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self._get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(f"the metadata key {key!r} is {value!r}; a number is expected")
        return float(value)

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(f"the metadata key {key!r} is {value!r}; a string is expected")
        return value

    def length(self, key: str) -> int | None:
        value = self._get(key)
        return len(value) if isinstance(value, list) else None


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """The configuration of the model in ``file``.

    Raises ModelConfigError for an architecture or a feature that is not implemented, and for metadata that
    is missing or of the wrong type; ModelFileError for tokens that end an answer and do not exist.
    """
    metadata = _Metadata(file)
    architecture = metadata.string("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise metadata.error(
            f"the architecture {architecture!r} is not implemented; implemented are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if metadata.integer(f"{architecture}.expert_count", 0):
        raise metadata.error("mixture-of-experts models are not implemented")
    num_heads = metadata.integer(f"{architecture}.attention.head_count")
    hidden_size = metadata.integer(f"{architecture}.embedding_length")
    head_dim = metadata.optional_integer(f"{architecture}.attention.key_length")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise metadata.error(f"embedding_length {hidden_size} is not a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    value_length = metadata.integer(f"{architecture}.attention.value_length", head_dim)
    if value_length != head_dim:
        raise metadata.error(f"keys of {head_dim} and values of {value_length} elements are not implemented")
    rotary_dim = metadata.integer(f"{architecture}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise metadata.error(
            f"rotary embeddings over {rotary_dim} of {head_dim} elements are not implemented"
        )
    vocab_size = metadata.optional_integer(f"{architecture}.vocab_size") or metadata.length(
        "tokenizer.ggml.tokens"
    )
    if vocab_size is None:
        raise metadata.error(f"neither {architecture}.vocab_size nor tokenizer.ggml.tokens is there")
    max_position = metadata.integer(f"{architecture}.context_length")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=metadata.integer(f"{architecture}.block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=metadata.integer(f"{architecture}.feed_forward_length"),
        rms_norm_eps=metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        max_position=max_position,
        rope=RopeConfig(
            theta=metadata.number(f"{architecture}.rope.freq_base", 10_000.0),
            scaling=_rope_scaling(file, metadata, architecture, head_dim, max_position),
        ),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=metadata.optional_integer(f"{architecture}.attention.sliding_window"),
        eos_token_ids=end_token_ids(file),
    )


def _rope_scaling(
    file: GgufFile, metadata: _Metadata, architecture: str, head_dim: int, max_position: int
) -> RopeScaling | None:
    divisors = _rope_divisors(file, metadata, head_dim)
    prefix = f"{architecture}.rope.scaling"
    kind = metadata.string(f"{prefix}.type", "none")
    if divisors is not None:
        if kind != "none":
            raise metadata.error(f"{prefix}.type {kind!r} together with {ROPE_DIVISORS_TENSOR}")
        return divisors
    if kind == "none":
        # Older files of linearly scaled models have only this key.
        factor = metadata.number(f"{architecture}.rope.scale_linear", 1.0)
        return None if factor == 1.0 else LinearScaling(factor)
    if kind == "linear":
        return LinearScaling(metadata.number(f"{prefix}.factor"))
    if kind == "yarn":
        factor = metadata.number(f"{prefix}.factor")
        extra = metadata.number(f"{prefix}.attn_factor", 1.0)
        return YarnScaling(
            factor=factor,
            original_max_position=metadata.integer(f"{prefix}.original_context_length", max_position),
            attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
        )
    raise metadata.error(
        f"{prefix}.type {kind!r} is not implemented; implemented are none, linear, yarn and the tensor "
        f"{ROPE_DIVISORS_TENSOR} (Llama 3.1)"
    )


def _rope_divisors(file: GgufFile, metadata: _Metadata, head_dim: int) -> FrequencyDivisors | None:
    tensor = file.tensors.get(ROPE_DIVISORS_TENSOR)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise metadata.error(
            f"the tensor {ROPE_DIVISORS_TENSOR!r} is {tensor.type_name} {list(tensor.shape)}; "
            f"F32 [{head_dim // 2}] is expected"
        )
    divisors = struct.unpack(f"<{head_dim // 2}f", file.data(ROPE_DIVISORS_TENSOR))
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise metadata.error(f"the tensor {ROPE_DIVISORS_TENSOR!r} holds divisors that are not positive")
    return FrequencyDivisors(divisors)
