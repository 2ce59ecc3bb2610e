"""The number formats that this machine computes in: those that ``auto`` may pick, and bfloat16."""

from __future__ import annotations

from engine.ops.number_formats import BFLOAT16, FLOAT16, FLOAT32, NumberFormat, has_float16_linear

FORMATS: list[NumberFormat] = [FLOAT32, *([FLOAT16] if has_float16_linear() else []), BFLOAT16]


def name_of(number_format: NumberFormat) -> str:
    """For pytest's ids."""
    return number_format.name
