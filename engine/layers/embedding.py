"""Token embedding and output head."""

from __future__ import annotations

import torch

from engine.layers.build import BuildContext
from engine.ops.number_formats import WeightRangeError


class EmbeddingAndHead:
    """The two layers that have one row per token of the vocabulary; together, as they may share weights.

    With tied weights the backend keeps the table twice: as rows to look up, and packed for the output head.
    """

    def __init__(self, context: BuildContext) -> None:
        config, weights, backend = context.config, context.weights, context.backend
        self._backend = backend
        shape = (config.vocab_size, config.hidden_size)
        table = weights.take("model.embed_tokens.weight", shape)
        self._table = backend.embedding_table(table)
        if config.tie_word_embeddings:
            weights.ignore("lm_head.weight")  # some checkpoints store the tied copy
            head = table
        else:
            head = weights.take("lm_head.weight", shape)
        try:
            self._head = backend.prepack_head(head)
        except WeightRangeError as error:
            raise WeightRangeError(f"the output head's weight: {error}") from None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[num_tokens]`` token ids to float32 ``[num_tokens, hidden_size]``."""
        return self._backend.embedding(token_ids, self._table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``[num_rows, hidden_size]`` to float32 ``[num_rows, vocab_size]``."""
        return self._backend.logits(hidden, self._head)
