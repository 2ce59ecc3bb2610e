"""A tensor as a file holds it, whole or the part of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.weights.errors import ShardError
from model_files.gguf import TENSOR_TYPES

_TYPES = MappingProxyType({each.name: each for each in TENSOR_TYPES.values()})


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``world_size`` equal parts of a tensor along ``dim``: that of ``rank``.

    ``dim`` 0 splits the rows of a weight ``[out_features, in_features]``, 1 its columns. Ranks that hold the
    same part (KV heads, where there are fewer of them than ranks) ask for it with the same ``rank``.
    """

    dim: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.dim < 0 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"there is no such part: {self}")


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Type, shape and bytes of a tensor as stored. What to compute with is for a backend to decide.

    ``type_name`` is GGUF's: F64, F32, F16, BF16, or a quantised type, whose rows are cut into blocks with
    common scales. ``data`` is uint8 ``[*shape[:-1], bytes of a row]``, read-only, and usually a view of the
    mapped file: copy what shall outlive it.
    """

    type_name: str
    shape: tuple[int, ...]  # elements, row-major
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        row_bytes = self.shape[-1] // self.block_elements * self.block_bytes
        expected = (*self.shape[:-1], row_bytes)
        assert self.data.shape == expected, f"{self.type_name} {self.shape}: {self.data.shape}"

    @property
    def block_elements(self) -> int:
        """Elements of one block; 1 for plain numbers."""
        return _TYPES[self.type_name].block_elements

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, or of one plain number."""
        return _TYPES[self.type_name].block_bytes

    @property
    def is_quantised(self) -> bool:
        """Whether numbers are stored in blocks with common scales, rather than each for itself."""
        return self.block_elements > 1

    def part(self, shard: Shard) -> StoredTensor:
        """A view of one rank's part. Raises ShardError where the tensor cannot be split so."""
        if shard.dim >= len(self.shape):
            raise ShardError(f"it has the shape {list(self.shape)}, and no dimension {shard.dim}")
        size = self.shape[shard.dim]
        length, rest = divmod(size, shard.world_size)
        if rest:
            raise ShardError(
                f"its dimension {shard.dim} of {size} elements cannot be split evenly over "
                f"{shard.world_size} ranks"
            )
        first, last = shard.rank * length, (shard.rank + 1) * length
        shape = (*self.shape[: shard.dim], length, *self.shape[shard.dim + 1 :])
        if shard.dim == len(self.shape) - 1:
            if length % self.block_elements:
                raise ShardError(
                    f"its rows of {size} elements cannot be split over {shard.world_size} ranks: {length} "
                    f"elements do not end at the end of a {self.type_name} block of {self.block_elements}"
                )
            first, last = (end // self.block_elements * self.block_bytes for end in (first, last))
        rows = (slice(None),) * shard.dim
        return StoredTensor(self.type_name, shape, self.data[(*rows, slice(first, last))])
