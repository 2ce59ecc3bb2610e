"""A table whose rows stay quantised until they are looked up."""

from __future__ import annotations

import torch

from engine.weights.dequantize import block_layout, decode_blocks


class QuantizedRows:
    """The rows of a quantised GGUF tensor, as stored: a quarter of the memory of float32 for Q8_0.

    Looking up a row gives the same values as dequantising the whole table to ``dtype`` would.
    """

    def __init__(
        self, data: memoryview | bytes, type_name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Copies ``data``. Raises ValueError for a type that is not quantised or a wrong length."""
        block_elements, block_bytes = block_layout(type_name)
        num_rows, row_elements = shape
        self._row_blocks, rest = divmod(row_elements, block_elements)
        if rest or len(data) != num_rows * self._row_blocks * block_bytes:
            raise ValueError(
                f"{len(data):,} bytes of type {type_name} cannot hold a table of shape {list(shape)}"
            )
        self._type_name = type_name
        self._block_bytes = block_bytes
        self._row_elements = row_elements
        self._dtype = dtype
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._raw = raw.view(num_rows, self._row_blocks * block_bytes)  # [num_rows, row_bytes]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Float32 ``[n, row_elements]`` for int64 ``indices`` ``[n]``."""
        blocks = self._raw.index_select(0, indices).view(-1, self._block_bytes)
        values = decode_blocks(blocks, self._type_name).view(-1, self._row_elements)
        return values if self._dtype is torch.float32 else values.to(self._dtype).float()
