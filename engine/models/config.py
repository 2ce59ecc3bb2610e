"""What a model looks like, whatever file format it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


class ModelConfigError(ValueError):
    """The model's configuration is broken or asks for something this engine does not implement."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: a ramp between scaled and kept frequencies, and cos and sin multiplied by a factor.

    ``attention_factor`` overrides that factor; else it is ``0.1 ln(factor) + 1``, with ``mscale`` and
    ``mscale_all_dim`` as DeepSeek defines them.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """Each frequency divided by its own number, ``head_dim / 2`` of them: how GGUF stores Llama 3.1's."""

    divisors: tuple[float, ...]


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: frequency ``i`` is ``theta ** (-2 i / head_dim)``, then scaled."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes are element counts, ``max_position`` is in tokens."""

    architecture: str  # as the file names it: "llama" or "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each query and key head, before rotation
    sliding_window: int | None = None  # tokens; only contexts that fit into it are served
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ModelConfigError(f"{name} is {value}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelConfigError(
                f"sliding_window is {self.sliding_window}; it must be at least 1 or absent"
            )

    def resolve_max_model_len(self, requested: int | None) -> int:
        """The longest context to serve, in tokens: ``requested``, or all that the model allows if None.

        Raises ModelConfigError when more is requested than the model's positions or its sliding window hold.
        """
        limit = self.max_position
        reason = f"the model has {self.max_position:,} positions"
        if self.sliding_window is not None and self.sliding_window < limit:
            limit = self.sliding_window
            reason = (
                f"{self.architecture} attends to a sliding window of {limit:,} tokens, and only contexts "
                "that fit into it are implemented"
            )
        if requested is None:
            return limit
        if not 1 <= requested <= limit:
            raise ModelConfigError(f"max_model_len {requested:,} is outside 1 to {limit:,}: {reason}")
        return requested
