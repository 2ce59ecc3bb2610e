"""Which number format a model runs in."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

DtypeName: TypeAlias = Literal["auto", "bfloat16", "float32"]

_BY_NAME = MappingProxyType({"bfloat16": torch.bfloat16, "float32": torch.float32})


def cpu_has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16 extension)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``; ``auto`` is bfloat16 where the CPU has it in hardware, else float32.

    Raises ValueError for another name.
    """
    if name == "auto":
        return torch.bfloat16 if cpu_has_native_bfloat16() else torch.float32
    if name not in _BY_NAME:
        raise ValueError(f"dtype {name!r} is not supported; supported are auto, {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that configuration and KvLayout use. Raises ValueError for an unsupported dtype."""
    for name, known in _BY_NAME.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype {dtype} is not supported; supported are {', '.join(_BY_NAME)}")
