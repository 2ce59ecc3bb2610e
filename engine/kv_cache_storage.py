"""The tensor that holds a worker's KV cache."""

from __future__ import annotations

from types import MappingProxyType

import torch

from cluster.kv_layout import KvLayout

NULL_BLOCK = 0  # never allocated to a sequence: padding and warm-ups write here

_DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})


class KvCacheStorage:
    """All KV blocks of one worker in one contiguous tensor.

    ``tensor`` is ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`` in the layout's dtype,
    block 0 included. It is zeroed at construction, so that its pages are in memory before a peer writes into
    them for the first time. A slot whose token was never computed may hold anything later, NaN included.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device | None = None) -> None:
        """Raises ValueError for fewer than two blocks (block 0 is scratch) or a layout's unknown dtype."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed, block 0 is scratch space")
        if layout.dtype not in _DTYPES:
            raise ValueError(f"KV dtype {layout.dtype!r} is unknown; known are {', '.join(_DTYPES)}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = torch.empty(
            (num_blocks, *layout.block_shape), dtype=_DTYPES[layout.dtype], device=device
        ).zero_()
        # torch.zeros may leave pages unmapped until the first write; an explicit fill touches all of them.

    @staticmethod
    def num_blocks_for(layout: KvLayout, num_bytes: int) -> int:
        """How many blocks fit into ``num_bytes``, block 0 included."""
        return num_bytes // layout.block_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def base_address(self) -> int:
        """Address of block 0; block ``i`` starts ``i * layout.block_bytes`` further."""
        return self.tensor.data_ptr()

    def layer(self, index: int) -> torch.Tensor:
        """A view of one layer: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``."""
        return self.tensor[:, index]

    def token_rows(self) -> torch.Tensor:
        """A view with one row per (block, layer, K or V, head, token), in this order: [rows, head_dim]."""
        return self.tensor.view(-1, self.layout.head_dim)

    def block_rows(self) -> torch.Tensor:
        """A view with one row per (block, layer, K or V, head): ``[rows, block_size * head_dim]``."""
        return self.tensor.view(-1, self.layout.block_size * self.layout.head_dim)
