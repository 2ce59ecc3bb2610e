"""Paged attention on the CPU, with results that do not depend on chunking or on the batch.

The step's queries are cut into tiles of ``TILE`` positions at absolute multiples of ``TILE``; a tile's keys
end where the tile ends. So the shape of every matrix product is given by the tile's position alone, wherever
a chunk or a prefix hit began and ended; missing query rows are padded, keys beyond the sequence are zero and
masked. A single new token (a decode step) computes only its own row, over the same padded keys. PyTorch's
flash-attention kernel gives a row the same bits for any number of query rows from some number on (fewer rows
take vector kernels with another order of summation): 4 for heads of up to 64 elements; for larger ones 4 to
12, depending on the processor. Decode rows are padded to a multiple of 4 or 16 accordingly, and so equal the
row that a prefill of the same tokens computes.

Why this kernel: one step over 300 keys (9 query and 3 KV heads of 64, one thread) takes it 23 us per layer,
the same as two batched matrix products with a softmax between, whose results change with the number of rows;
with bfloat16 keys it takes 32 us, more than converting them costs, and rounds the probabilities. A mask adds
under 5 percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache_storage import NULL_BLOCK, KvCacheStorage
from engine.ops.backend import SequenceSpan
from engine.ops.number_formats import FLOAT16_MAX

TILE = 32  # positions; at most 191, where the kernel starts to split queries differently
_SMALL_HEAD_DIM = 64
_SMALL_HEAD_ROWS, _LARGE_HEAD_ROWS = 4, 16  # see above
_GROUP_BYTES = 8 * 2**20  # of gathered float32 keys and values that decode sequences may share a call for


class CausalMask:
    """Additive masks for tiles, all views of one tensor that grows as needed."""

    def __init__(self) -> None:
        self._build(1024 - TILE)

    def _build(self, num_context: int) -> None:
        self._num_context = num_context
        self._mask = torch.zeros(TILE, num_context + TILE)
        self._mask[:, num_context:].fill_(float("-inf")).triu_(diagonal=1)

    def tile(self, tile_start: int) -> torch.Tensor:
        """The mask of the tile at position ``tile_start``: ``[TILE, tile_start + TILE]``, 0 or -inf."""
        if tile_start > self._num_context:
            self._build(max(tile_start, 2 * self._num_context))
        return self._mask[:, self._num_context - tile_start :]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query rows ``first`` to ``last`` of the padded queries, over the first ``num_keys`` keys."""

    first: int
    last: int
    num_keys: int
    mask: torch.Tensor  # [TILE, num_keys]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several new tokens of one sequence."""

    query_start: int
    query_len: int
    lead: int  # padding rows before the first query
    seq_len: int
    num_keys: int  # seq_len rounded up to a tile
    gather_rows: torch.Tensor  # of layer 0; ordered [2, num_kv_heads, blocks]
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one new token each and the same ``num_keys``."""

    tokens: torch.Tensor  # [num_seqs] rows of the token axis
    num_keys: int
    gather_rows: torch.Tensor  # of layer 0; ordered [2, num_seqs, num_kv_heads, blocks]
    mask: torch.Tensor  # [num_seqs, 1, 1, num_keys]
    unused: torch.Tensor  # [num_seqs, 1, TILE, 1]: True for the last tile's positions beyond the sequence


class CpuPagedAttention:
    """One step's attention; implements PagedAttention."""

    def __init__(
        self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage, causal_mask: CausalMask
    ) -> None:
        self._layout = kv_cache.layout
        self._row_multiple = (
            _SMALL_HEAD_ROWS if self._layout.head_dim <= _SMALL_HEAD_DIM else _LARGE_HEAD_ROWS
        )
        self._token_rows = kv_cache.token_rows()
        self._block_rows = kv_cache.block_rows()
        heads = self._layout.num_kv_heads
        self._block_rows_per_layer = 2 * heads
        self._token_rows_per_layer = 2 * heads * self._layout.block_size
        # First row of (K or V, head) of block 0, layer 0.
        self._head_rows = torch.arange(2 * heads).view(2, 1, heads, 1)
        self._write_rows = self._plan_writes(spans)
        self._chunks = [self._plan_chunk(span, causal_mask) for span in spans if span.query_len > 1]
        self._decodes = self._plan_decodes([span for span in spans if span.query_len == 1], causal_mask)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        num_tokens, heads, head_dim = key.shape
        key_value = torch.empty(num_tokens, 2, heads, head_dim, dtype=self._token_rows.dtype)
        if key_value.dtype is torch.float16:  # a value beyond its range would become infinite
            key, value = key.clamp(-FLOAT16_MAX, FLOAT16_MAX), value.clamp(-FLOAT16_MAX, FLOAT16_MAX)
        key_value[:, 0] = key
        key_value[:, 1] = value
        rows = self._write_rows + layer * self._token_rows_per_layer
        self._token_rows.index_copy_(0, rows, key_value.view(-1, head_dim))

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.empty(query.shape)
        for chunk in self._chunks:
            self._attend_chunk(chunk, layer, query, scale, out)
        for group in self._decodes:
            self._attend_decodes(group, layer, query, scale, out)
        return out

    def _plan_writes(self, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        block_size, heads = self._layout.block_size, self._layout.num_kv_heads
        first_rows: list[int] = []  # of head 0's key in layer 0, one per token
        rows_per_block = self._layout.num_layers * self._token_rows_per_layer
        for span in spans:
            for position in range(span.context_len, span.seq_len):
                block = span.block_ids[position // block_size]
                first_rows.append(block * rows_per_block + position % block_size)
        head_rows = torch.arange(2 * heads) * block_size
        return (torch.tensor(first_rows)[:, None] + head_rows).view(-1)  # [num_tokens * 2 * num_kv_heads]

    def _gather_rows(self, spans: Sequence[SequenceSpan], num_keys: int) -> torch.Tensor:
        """Rows of layer 0 that hold the sequences' blocks; missing blocks are the null block."""
        num_blocks = -(-num_keys // self._layout.block_size)
        tables = []
        for span in spans:
            table = list(span.block_ids[: -(-span.seq_len // self._layout.block_size)])
            tables.append(table + [NULL_BLOCK] * (num_blocks - len(table)))
        first_rows = torch.tensor(tables) * (self._layout.num_layers * self._block_rows_per_layer)
        return (self._head_rows + first_rows[None, :, None, :]).view(-1)

    def _plan_chunk(self, span: SequenceSpan, causal_mask: CausalMask) -> _Chunk:
        first_tile = span.context_len // TILE * TILE
        num_keys = -(-span.seq_len // TILE) * TILE
        return _Chunk(
            query_start=span.query_start,
            query_len=span.query_len,
            lead=span.context_len - first_tile,
            seq_len=span.seq_len,
            num_keys=num_keys,
            gather_rows=self._gather_rows([span], num_keys),
            tiles=tuple(
                _Tile(start - first_tile, start - first_tile + TILE, start + TILE, causal_mask.tile(start))
                for start in range(first_tile, num_keys, TILE)
            ),
        )

    def _plan_decodes(self, spans: Sequence[SequenceSpan], causal_mask: CausalMask) -> list[_DecodeGroup]:
        by_num_keys: dict[int, list[SequenceSpan]] = {}
        for span in spans:
            by_num_keys.setdefault(-(-span.seq_len // TILE) * TILE, []).append(span)
        groups = []
        for num_keys, members in by_num_keys.items():
            bytes_per_sequence = 2 * self._layout.num_kv_heads * num_keys * self._layout.head_dim * 4
            size = max(1, _GROUP_BYTES // bytes_per_sequence)
            for start in range(0, len(members), size):
                groups.append(self._plan_group(members[start : start + size], num_keys, causal_mask))
        return groups

    def _plan_group(
        self, spans: Sequence[SequenceSpan], num_keys: int, causal_mask: CausalMask
    ) -> _DecodeGroup:
        tile_start = num_keys - TILE
        offsets = torch.tensor([span.context_len - tile_start for span in spans])  # within the last tile
        return _DecodeGroup(
            tokens=torch.tensor([span.query_start for span in spans]),
            num_keys=num_keys,
            gather_rows=self._gather_rows(spans, num_keys),
            mask=causal_mask.tile(tile_start)[offsets][:, None, None, :],
            unused=(torch.arange(TILE) > offsets[:, None])[:, None, :, None],
        )

    def _gather(self, rows: torch.Tensor, layer: int, num_seqs: int, num_keys: int) -> torch.Tensor:
        """Keys and values as float32 ``[2, num_seqs, num_kv_heads, num_keys, head_dim]``, a fresh tensor."""
        heads, head_dim = self._layout.num_kv_heads, self._layout.head_dim
        stored = self._block_rows.index_select(0, rows + layer * self._block_rows_per_layer)
        return stored.view(2, num_seqs, heads, -1, head_dim)[:, :, :, :num_keys].float()

    def _attend_chunk(
        self, chunk: _Chunk, layer: int, query: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        heads, head_dim = self._layout.num_kv_heads, self._layout.head_dim
        num_heads = query.shape[1]
        group = num_heads // heads
        rows = slice(chunk.query_start, chunk.query_start + chunk.query_len)
        padded = torch.zeros(num_heads, chunk.tiles[-1].last, head_dim)
        padded[:, chunk.lead : chunk.lead + chunk.query_len] = query[rows].transpose(0, 1)
        queries = padded.view(heads, group, -1, head_dim)
        key_value = self._gather(chunk.gather_rows, layer, 1, chunk.num_keys)
        key_value[:, :, :, chunk.seq_len :] = 0.0  # a masked NaN would still poison its row
        # The KV head is the kernel's batch axis, so that its query heads share keys without a copy.
        key, value = key_value.view(2, heads, 1, -1, head_dim).expand(-1, -1, group, -1, -1)
        padded_out = torch.empty_like(padded)
        out_view = padded_out.view(heads, group, -1, head_dim)
        for tile in chunk.tiles:
            out_view[:, :, tile.first : tile.last] = _flash_attention(
                queries[:, :, tile.first : tile.last],
                key[:, :, : tile.num_keys],
                value[:, :, : tile.num_keys],
                tile.mask,
                scale,
            )
        out[rows] = padded_out[:, chunk.lead : chunk.lead + chunk.query_len].transpose(0, 1)

    def _attend_decodes(
        self, group: _DecodeGroup, layer: int, query: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        heads, head_dim = self._layout.num_kv_heads, self._layout.head_dim
        num_seqs = group.tokens.shape[0]
        queries_per_kv = query.shape[1] // heads
        num_rows = -(-queries_per_kv // self._row_multiple) * self._row_multiple
        queries = query.index_select(0, group.tokens).view(num_seqs, heads, queries_per_kv, head_dim)
        if num_rows != queries_per_kv:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, num_rows - queries_per_kv))
        key_value = self._gather(group.gather_rows, layer, num_seqs, group.num_keys)
        key_value[:, :, :, -TILE:].masked_fill_(group.unused, 0.0)
        result = _flash_attention(
            queries, key_value[0], key_value[1], group.mask.expand(-1, -1, num_rows, -1), scale
        )
        result = result[:, :, :queries_per_kv].reshape(num_seqs, -1, head_dim)
        out.index_copy_(0, group.tokens, result)


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scale
    )[0]
    return out
