"""The shape of a worker's KV cache, as peers must know it to copy blocks."""

from __future__ import annotations

import msgspec

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A block-major paged KV cache, sharded by heads over ``tp_size`` ranks.

    Each rank holds ``[num_blocks, num_layers, num_planes, heads_per_rank, block_size, head_dim]``.
    Block-major, because a block of all layers is then one contiguous run of bytes, and one descriptor moves
    it. Heads come before tokens (vLLM calls that HND), so that a rank's heads of a block can be cut out in
    few pieces.

    The two planes are K and V. A cache with one plane keeps a latent that stands for both, as multi-head
    latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) does: one head, ``head_dim`` being the latent's
    width.

    ``num_kv_heads`` counts the model's heads, whatever ``tp_size`` is. Ranks take consecutive heads; where
    there are more ranks than heads, consecutive ranks hold the same one. vLLM's QKVParallelLinear shares
    out the weights in this way.

    Raises ``ValueError`` for a size below 1, an unknown dtype, or heads that cannot be shared out evenly.
    """

    num_layers: int
    num_kv_heads: int  # of the model: all ranks together, replicas counted once
    head_dim: int
    block_size: int  # tokens
    dtype: str  # "float32" | "bfloat16" | "float16"
    tp_size: int = 1
    num_planes: int = 2  # K and V; 1: a latent for both

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KV layout: {name} is {getattr(self, name)}, must be at least 1")
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"KV layout: dtype is {self.dtype!r}, must be one of {', '.join(_DTYPE_BYTES)}")
        if self.num_planes not in (1, 2):
            raise ValueError(f"KV layout: num_planes is {self.num_planes}, must be 1 or 2")
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ValueError(
                f"KV layout: tp_size is {self.tp_size}, must divide num_kv_heads {self.num_kv_heads} or be a "
                "multiple of it"
            )

    @property
    def heads_per_rank(self) -> int:
        """Heads in each rank's cache."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def num_head_replicas(self) -> int:
        """How many ranks hold each head."""
        return max(1, self.tp_size // self.num_kv_heads)

    def heads_of_rank(self, rank: int) -> range:
        """The model's heads that ``rank`` holds, in its cache's order. Raises ValueError for no such rank."""
        if not 0 <= rank < self.tp_size:
            raise ValueError(f"rank is {rank}, must be 0 to {self.tp_size - 1}")
        first = rank * self.num_kv_heads // self.tp_size
        return range(first, first + self.heads_per_rank)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """One rank's block: ``(num_layers, num_planes, heads_per_rank, block_size, head_dim)``."""
        return (self.num_layers, self.num_planes, self.heads_per_rank, self.block_size, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head in one plane of one layer: the smallest piece that is ever moved."""
        return self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one rank: all layers and planes."""
        return self.num_layers * self.num_planes * self.heads_per_rank * self.block_size * self.row_bytes


def why_not_convertible(source: KvLayout, target: KvLayout) -> str | None:
    """Why a cache of one layout cannot fill one of the other, by name and both values; None if it can.

    ``block_size`` and ``tp_size`` may differ: they only say where a value lies. Symmetric.
    """
    for name in ("num_layers", "num_planes", "num_kv_heads", "head_dim", "dtype"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            return f"{name} differs: the source has {ours}, the target {theirs}"
    return None
