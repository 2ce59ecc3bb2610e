"""What every weight format looks like to a model: named tensors, each read once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from engine.weights.quantized_rows import QuantizedRows


class WeightError(ValueError):
    """The weights do not fit the model; the message names the file, the tensor and what was expected."""


class WeightSource(Protocol):
    """Tensors by canonical name, which is the name Hugging Face's checkpoints use."""

    @property
    def location(self) -> str:
        """The file or folder, for error messages."""

    def names(self) -> Collection[str]:
        """Canonical names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape. Raises KeyError for an unknown name."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor that owns its memory. Raises KeyError for an unknown name."""

    def quantized_rows(self, name: str, dtype: torch.dtype) -> QuantizedRows | None:
        """The two-dimensional tensor ``name`` as rows in their stored form; None if it is not quantised."""

    def close(self) -> None:
        """Gives the files up."""


class WeightReader:
    """Hands a model the tensors it asks for and knows which nobody asked for.

    Layers call :meth:`take` once per parameter while the model is built, so that only one parameter at a
    time is held in its stored form. :meth:`finish` then refuses tensors that no layer took.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._remaining = set(source.names())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor ``name`` in ``dtype``. Raises WeightError if it is missing or has another shape."""
        if name not in self._remaining:
            raise WeightError(f"{self._source.location}: the tensor {name!r} is missing")
        stored = self._source.shape(name)
        if stored != shape:
            raise WeightError(
                f"{self._source.location}: the tensor {name!r} has the shape {list(stored)}, "
                f"the model's configuration asks for {list(shape)}"
            )
        self._remaining.remove(name)
        return self._source.read(name, dtype)

    def quantized_rows(self, name: str, dtype: torch.dtype) -> QuantizedRows | None:
        """Rows of a tensor in their stored form, without taking the tensor; None if it is not quantised."""
        return self._source.quantized_rows(name, dtype) if name in self._remaining else None

    def ignore(self, name: str) -> None:
        """Marks a tensor as known but not needed."""
        self._remaining.discard(name)

    def finish(self) -> None:
        """Raises WeightError naming the tensors that no layer took."""
        if self._remaining:
            unknown = sorted(self._remaining)
            shown = ", ".join(repr(name) for name in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise WeightError(
                f"{self._source.location}: the model has no place for the tensors {shown}{more}"
            )
