"""Turns one scheduled batch into logits."""

from __future__ import annotations

import torch

from cluster.kv_layout import KvLayout
from engine.batch import Batch, ScheduledSequence
from engine.kv_cache_storage import KvCacheStorage
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.ops.backend import SequenceSpan, StepContext


def kv_layout(config: ModelConfig, block_size: int, dtype: str) -> KvLayout:
    """The layout of a KV cache for this model. ``block_size`` is in tokens.

    Raises ValueError for a block size below 1 or a ``dtype`` that no cache has.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
    )


class ModelRunner:
    """Runs a model over a KV cache, one batch at a time.

    All sequences of a batch, prefill chunks and decode tokens alike, go through the model as one flat list
    of tokens. A sequence's logits depend on its own tokens only: not on its batch, nor on how its prompt was
    cut into chunks.
    """

    def __init__(self, model: Decoder, kv_cache: KvCacheStorage) -> None:
        """Raises ValueError where the KV cache has another shape than the model's."""
        expected = kv_layout(model.config, kv_cache.layout.block_size, kv_cache.layout.dtype)
        if kv_cache.layout != expected:
            raise ValueError(f"the KV cache is laid out as {kv_cache.layout}, the model needs {expected}")
        self._model = model
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes the batch's tokens and writes their keys and values into the KV cache.

        Gives float32 logits ``[sum of num_logits, vocab_size]``: for each sequence in batch order those at
        its last ``num_logits`` tokens.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[SequenceSpan] = []
        logits_rows: list[int] = []
        for sequence in batch.sequences:
            self._check(sequence)
            num_tokens = len(sequence.token_ids)
            spans.append(SequenceSpan(len(token_ids), num_tokens, sequence.start, sequence.block_ids))
            token_ids.extend(sequence.token_ids)
            positions.extend(range(sequence.start, sequence.start + num_tokens))
            logits_rows.extend(range(len(token_ids) - sequence.num_logits, len(token_ids)))
        device = self._model.backend.device
        if not token_ids:
            return torch.empty(0, self._model.config.vocab_size, device=device)
        cos, sin = self._model.rotary.at(torch.tensor(positions, device=device))
        context = StepContext(cos, sin, self._model.backend.plan_attention(spans, self._kv_cache))
        hidden = self._model.forward(torch.tensor(token_ids, device=device), context)
        if not logits_rows:
            return hidden.new_empty(0, self._model.config.vocab_size)
        return self._model.logits(hidden[torch.tensor(logits_rows, device=device)])

    def _check(self, sequence: ScheduledSequence) -> None:
        """The scheduler's promises. A broken one would read or write another sequence's blocks."""
        end = sequence.start + len(sequence.token_ids)
        covered = len(sequence.block_ids) * self._kv_cache.layout.block_size
        assert len(sequence.token_ids) > 0, f"{sequence.request_id}: no tokens to compute"
        assert 0 <= sequence.num_logits <= len(sequence.token_ids), (
            f"{sequence.request_id}: logits at {sequence.num_logits} of {len(sequence.token_ids)} tokens"
        )
        assert sequence.start >= 0, f"{sequence.request_id}: start {sequence.start}"
        assert end <= covered, f"{sequence.request_id}: {end} positions, blocks for {covered}"
        assert end <= self._model.max_model_len, (
            f"{sequence.request_id}: {end} positions, the model was built for {self._model.max_model_len}"
        )
