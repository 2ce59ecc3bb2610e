"""The shape of one worker's KV cache, as peers must know it to copy blocks."""

from __future__ import annotations

import hashlib

import msgspec

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A block-major paged KV cache: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.

    Block-major, because a block of all layers is then one contiguous run of bytes, and one descriptor moves
    it. The third axis holds K then V.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # "float32" | "bfloat16" | "float16"
    tp_size: int = 1

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: ``(num_layers, 2, num_kv_heads, block_size, head_dim)``."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        return (
            self.num_layers
            * 2
            * self.num_kv_heads
            * self.block_size
            * self.head_dim
            * _DTYPE_BYTES[self.dtype]
        )

    def fingerprint(self) -> str:
        """A short hash equal for equal layouts in every process."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
