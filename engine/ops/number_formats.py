"""Which number formats a model can run in, and what ``auto`` means."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a model computes. Sums, norms, rotation, softmax and logits are float32 in every format.

    ``name`` is what ``model.dtype`` calls it; workers pair only where it is the same.
    """

    name: str
    weights: torch.dtype
    activations: torch.dtype  # inputs and outputs of linear layers

    @property
    def loaded(self) -> torch.dtype:
        """What weights are read as, to be packed: the kernels for float16 round by themselves."""
        return torch.float32 if self.weights is torch.float16 else self.weights


FLOAT32 = NumberFormat("float32", torch.float32, torch.float32)
FLOAT16 = NumberFormat("float16", torch.float16, torch.float32)
BFLOAT16 = NumberFormat("bfloat16", torch.bfloat16, torch.bfloat16)

_BY_NAME = MappingProxyType({each.name: each for each in (FLOAT32, FLOAT16, BFLOAT16)})


FLOAT16_MAX = torch.finfo(torch.float16).max


class WeightRangeError(ValueError):
    """A weight is too large for the number format; the message names the tensor and the largest value."""


def check_float16_range(weight: torch.Tensor) -> None:
    """Raises WeightRangeError where an element would not be finite in float16."""
    smallest, largest = torch.aminmax(weight)
    extreme = max(-smallest.item(), largest.item())
    if extreme > FLOAT16_MAX:
        raise WeightRangeError(f"a weight of {extreme:g} is beyond float16's {FLOAT16_MAX:,.0f}")


def has_float16_linear() -> bool:
    """Whether torch multiplies float32 by float16 weights here: x86-64 with AVX2, through FBGEMM."""
    quantized = torch.backends.quantized
    return "fbgemm" in quantized.supported_engines and quantized.engine in ("fbgemm", "x86")


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16 extension)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def number_formats(name: str, *, has_float16: bool) -> tuple[NumberFormat, ...]:
    """The formats that ``name`` allows, the first choice first.

    ``auto`` is float16 where the CPU has fast kernels for it (``has_float16``), and float32 where it has
    not or where a weight is beyond float16's range. It is never bfloat16: that changes first answers
    (docs/number-formats.md). Raises ValueError for an unknown name, and for float16 where it cannot be
    computed.
    """
    if name == "auto":
        return (FLOAT16, FLOAT32) if has_float16 else (FLOAT32,)
    if name not in _BY_NAME:
        raise ValueError(f"dtype {name!r} is not supported; supported are auto, {', '.join(_BY_NAME)}")
    if name == "float16" and not has_float16:
        raise ValueError(
            "dtype 'float16' needs an x86-64 processor with AVX2 and a torch built with FBGEMM; "
            "use auto, float32 or bfloat16 here"
        )
    return (_BY_NAME[name],)


def resolve_kv_cache_dtype(setting: str, number_format: NumberFormat) -> str:
    """The KV cache's dtype as ``KvLayout`` names it; ``auto`` keeps as many bits as the weights have."""
    return str(number_format.weights).removeprefix("torch.") if setting == "auto" else setting
