"""The tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.weights.errors import WeightError
from engine.weights.stored_tensor import StoredTensor
from model_files.model_source import safetensors_files

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class _Entry(NamedTuple):
    path: Path
    file: Any  # safetensors.safe_open
    type_name: str
    shape: tuple[int, ...]


class SafetensorsWeights:
    """A WeightSource over memory-mapped safetensors files.

    Raises WeightError at construction where a file is broken, a tensor is in two files or is no float tensor;
    ModelNotFoundError where a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files = contextlib.ExitStack()
        self._tensors: dict[str, _Entry] = {}
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
            type_name = stored.get_dtype()
            if type_name not in _FLOAT_TYPES:
                raise WeightError(
                    f"{path}: the tensor {name!r} has the type {type_name}; "
                    f"readable are {', '.join(_FLOAT_TYPES)}"
                )
            self._tensors[name] = _Entry(path, opened, type_name, tuple(stored.get_shape()))

    @property
    def location(self) -> Path:
        """The folder."""
        return self._folder

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor ``name``. Raises KeyError."""
        return self._tensors[name].path

    def names(self) -> Collection[str]:
        """Names of all tensors in the folder."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``. Raises KeyError."""
        return self._tensors[name].shape

    def read(self, name: str) -> StoredTensor:
        """The tensor ``name`` as stored. Raises KeyError."""
        entry = self._tensors[name]
        tensor: torch.Tensor = entry.file.get_tensor(name)
        return StoredTensor(entry.type_name, entry.shape, tensor.view(torch.uint8).numpy())

    def close(self) -> None:
        """Closes the files."""
        self._tensors.clear()
        self._files.close()
