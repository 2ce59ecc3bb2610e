"""The decoder of the Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3.

They differ in sizes, biases, head norms and rotation, all of which ``ModelConfig`` says and the layers
follow. Other kinds of attention or feed-forward layers are chosen in ``build_attention`` and ``build_mlp``.
"""

from __future__ import annotations

import torch

from engine.layers.attention import build_attention
from engine.layers.build import BuildContext
from engine.layers.embedding import EmbeddingAndHead
from engine.layers.mlp import build_mlp
from engine.layers.norm import RmsNorm
from engine.layers.rotary import RotaryTables
from engine.models.config import ModelConfig
from engine.ops.backend import Backend, StepContext


class DecoderLayer:
    """Attention and feed-forward, each normalised before and added to the residual stream after.

    What a layer computed last is added by the norm that follows it, in the next layer.
    """

    def __init__(self, context: BuildContext, layer: int) -> None:
        prefix, hidden_size = f"model.layers.{layer}", context.config.hidden_size
        self._attention_norm = RmsNorm(context, f"{prefix}.input_layernorm", hidden_size)
        self._attention = build_attention(context, layer)
        self._mlp_norm = RmsNorm(context, f"{prefix}.post_attention_layernorm", hidden_size)
        self._mlp = build_mlp(context, layer)

    def __call__(
        self, residual: torch.Tensor, update: torch.Tensor | None, context: StepContext
    ) -> torch.Tensor:
        """Takes ``update``, what the layer before gave, into ``residual``, and gives this layer's own.

        ``residual`` is float32 ``[num_tokens, hidden_size]`` and changes in place; the first layer has no
        ``update``.
        """
        if update is None:
            normed = self._attention_norm(residual)
        else:
            normed = self._attention_norm.after_adding(residual, update)
        normed = self._mlp_norm.after_adding(residual, self._attention(normed, context))
        return self._mlp(normed)


class Decoder:
    """A decoder with its weights. Building it reads them; ``forward`` changes nothing but the KV cache."""

    def __init__(self, context: BuildContext) -> None:
        """Raises WeightError for a missing or misshapen tensor."""
        config = context.config
        self._config = config
        self._backend = context.backend
        self._max_model_len = context.max_model_len
        self._embedding = EmbeddingAndHead(context)
        self._layers = [DecoderLayer(context, layer) for layer in range(config.num_layers)]
        self._norm = RmsNorm(context, "model.norm", config.hidden_size)
        self._rotary = RotaryTables(
            config.rope, config.head_dim, context.max_model_len, context.backend.device
        )

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def backend(self) -> Backend:
        """The operations the model runs on."""
        return self._backend

    @property
    def max_model_len(self) -> int:
        """The longest context the model was built for, in tokens."""
        return self._max_model_len

    @property
    def rotary(self) -> RotaryTables:
        """The rotation of each position below ``max_model_len``."""
        return self._rotary

    def forward(self, token_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """One pass over a flat batch: writes its keys and values, gives the last layer's output.

        ``token_ids`` is int64 ``[num_tokens]``; the result is float32 ``[num_tokens, hidden_size]``.
        """
        residual, update = self._embedding.embed(token_ids), None
        for layer in self._layers:
            update = layer(residual, update, context)
        return residual if update is None else residual.add_(update)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``[num_rows, vocab_size]`` for rows of :meth:`forward`'s result."""
        return self._embedding.logits(self._norm(hidden))
