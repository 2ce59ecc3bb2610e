"""A table whose rows stay quantised until they are looked up."""

from __future__ import annotations

import torch

from engine.weights.dequantize import decode_blocks
from engine.weights.stored_tensor import StoredTensor


class QuantizedRows:
    """The rows of a quantised GGUF tensor, as stored: a quarter of the memory of float32 for Q8_0.

    Looking up a row gives the same values as dequantising the whole table to ``dtype`` would.
    """

    def __init__(self, stored: StoredTensor, dtype: torch.dtype) -> None:
        """Copies ``stored``, a quantised ``[num_rows, row_elements]``."""
        assert stored.is_quantised, stored.type_name
        assert len(stored.shape) == 2, stored.shape
        self._type_name = stored.type_name
        self._block_bytes = stored.block_bytes
        self._row_elements = stored.shape[1]
        self._dtype = dtype
        self._raw = torch.from_numpy(stored.data.copy())  # [num_rows, row_bytes]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Float32 ``[n, row_elements]`` for int64 ``indices`` ``[n]``."""
        blocks = self._raw.index_select(0, indices).view(-1, self._block_bytes)
        values = decode_blocks(blocks, self._type_name).view(-1, self._row_elements)
        return values if self._dtype is torch.float32 else values.to(self._dtype).float()
