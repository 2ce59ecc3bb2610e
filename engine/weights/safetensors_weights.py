"""The tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from engine.weights.source import WeightError
from model_files.model_source import safetensors_files

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsWeights:
    """A WeightSource over memory-mapped safetensors files.

    Raises WeightError at construction where a file is broken, a tensor is in two files or is no float tensor;
    ModelNotFoundError where a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files = contextlib.ExitStack()
        self._tensors: dict[str, tuple[Any, tuple[int, ...]]] = {}  # name -> (file, shape)
        try:
            for path in safetensors_files(folder):
                try:
                    opened = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
                    self._add_file(path, opened)
                except SafetensorError as error:
                    raise WeightError(f"{path} is not a safetensors file: {error}") from None
        except BaseException:
            self._files.close()
            raise

    def _add_file(self, path: Path, opened: Any) -> None:
        for name in opened.keys():  # noqa: SIM118 - no dict
            if name in self._tensors:
                raise WeightError(f"{path}: the tensor {name!r} is in another file of {self._folder}, too")
            stored = opened.get_slice(name)
            if stored.get_dtype() not in _FLOAT_TYPES:
                raise WeightError(
                    f"{path}: the tensor {name!r} has the type {stored.get_dtype()}; "
                    f"readable are {', '.join(_FLOAT_TYPES)}"
                )
            self._tensors[name] = (opened, tuple(stored.get_shape()))

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self._folder)

    def names(self) -> Collection[str]:
        """Names of all tensors in the folder."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``. Raises KeyError."""
        return self._tensors[name][1]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor ``name`` in ``dtype``, copied out of the file. Raises KeyError."""
        tensor: torch.Tensor = self._tensors[name][0].get_tensor(name)
        return tensor.to(dtype, copy=True)

    def quantized_rows(self, name: str, dtype: torch.dtype) -> None:
        """Nothing here is quantised."""

    def close(self) -> None:
        """Closes the files."""
        self._tensors.clear()
        self._files.close()
