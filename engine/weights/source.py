"""What every weight format looks like to a model: named tensors, each read once."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from engine.weights.errors import ShardError, WeightError
from engine.weights.stored_tensor import Shard, StoredTensor


class WeightSource(Protocol):
    """Tensors by canonical name, which is the name Hugging Face's checkpoints use."""

    @property
    def location(self) -> Path:
        """The file or folder, for error messages."""

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, for error messages. Raises KeyError for an unknown name."""

    def names(self) -> Collection[str]:
        """Canonical names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape. Raises KeyError for an unknown name."""

    def read(self, name: str) -> StoredTensor:
        """The whole tensor as stored, where possible without a copy. Raises KeyError for an unknown name."""

    def close(self) -> None:
        """Gives the files up."""


class WeightReader:
    """Hands a model the tensors it asks for and knows which nobody asked for.

    Layers call :meth:`take` once per parameter while the model is built. :meth:`finish` then refuses tensors
    that no layer took.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._remaining = set(source.names())

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None = None) -> StoredTensor:
        """The tensor ``name`` of ``shape`` as stored, or one rank's part of it.

        Raises WeightError if it is missing or has another shape, ShardError (a WeightError) if it cannot be
        split so; the message names the file, the tensor, what was expected and what was found.
        """
        if name not in self._remaining:
            raise WeightError(self._missing(name, shape))
        file, found = self._source.file_of(name), self._source.shape(name)
        if found != shape:
            raise WeightError(
                f"{file}: the tensor {name!r} has the shape {list(found)}, "
                f"the model's configuration asks for {list(shape)}"
            )
        self._remaining.remove(name)
        stored = self._source.read(name)
        if shard is None:
            return stored
        try:
            return stored.part(shard)
        except ShardError as error:
            raise ShardError(f"{file}: the tensor {name!r} cannot be shared out: {error}") from None

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

    def _missing(self, name: str, shape: tuple[int, ...]) -> str:
        names = self._source.names()
        assert name not in names, f"{name} was taken before"
        matches = difflib.get_close_matches(name, names)
        similar = [f"{match!r} {list(self._source.shape(match))}" for match in matches]
        found = f"similar are {', '.join(similar)}" if similar else f"none of its {len(names)} is similar"
        return f"{self._source.location}: the tensor {name!r} of shape {list(shape)} is missing; {found}"
