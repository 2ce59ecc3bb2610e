"""The numeric operations a device must provide to run a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from engine.kv_cache_storage import KvCacheStorage
from engine.ops.number_formats import NumberFormat
from engine.weights.quantized_rows import QuantizedRows
from engine.weights.stored_tensor import StoredTensor


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The rows of a step's flat token axis that belong to one sequence.

    They are the positions ``context_len`` to ``seq_len - 1``; ``block_ids`` covers all positions below
    ``seq_len``.
    """

    query_start: int
    query_len: int
    context_len: int
    block_ids: Sequence[int]

    @property
    def seq_len(self) -> int:
        """Positions that exist after this step."""
        return self.context_len + self.query_len


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight in the layout a backend made for itself. Opaque to everyone else."""

    weight: torch.Tensor | torch.ScriptObject
    bias: torch.Tensor | None  # [out_features]; None also where it is packed with the weight
    in_features: int
    out_features: int


EmbeddingTable: TypeAlias = torch.Tensor | QuantizedRows
"""``[vocab_size, hidden_size]`` as a backend keeps it. Opaque to everyone else."""


class PagedAttention(Protocol):
    """One step's access to the KV cache; made once per step, used by every layer."""

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the step's keys and values, ``[num_tokens, num_kv_heads, head_dim]``, in their slots."""

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention of ``query`` over each sequence's own cached keys and values.

        ``query`` is ``[num_tokens, num_heads, head_dim]`` float32; heads ``h * G`` to ``h * G + G - 1`` read
        KV head ``h``, where ``G = num_heads / num_kv_heads`` is any number. Gives float32 of the same shape.
        Reads no slot at or beyond a sequence's length.
        """


class Backend(Protocol):
    """Operations on one device, in one number format.

    A row's result is bitwise the same whichever rows share the step, and however many.
    """

    @property
    def device(self) -> torch.device:
        """Where weights and KV cache live."""

    @property
    def number_format(self) -> NumberFormat:
        """How weights, activations and KV cache are kept."""

    @property
    def kernels(self) -> str:
        """For people: which kernels compute the linear layers."""

    def vector(self, stored: StoredTensor) -> torch.Tensor:
        """A norm's weight as float32 on the device."""

    def prepack_linear(
        self, weights: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()
    ) -> PackedLinear:
        """Lays linear layers with one input, each ``[out_features, in_features]``, out as one.

        Their outputs follow each other on the last axis. ``biases`` is empty or has one for each. Whether
        quantised weights stay so is the backend's choice. Raises WeightRangeError where it cannot hold a
        weight.
        """

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``x`` ``[num_tokens, in_features]``, in the activations' dtype."""

    def prepack_head(self, weight: StoredTensor) -> PackedLinear:
        """Lays the output head's ``weight``, ``[vocab_size, hidden_size]``, out for :meth:`logits`.

        Raises as :meth:`prepack_linear`.
        """

    def embedding_table(self, table: StoredTensor) -> EmbeddingTable:
        """``[vocab_size, hidden_size]`` for :meth:`embedding`; quantised or not is the backend's choice."""

    def embedding(self, token_ids: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        """Rows of the table, ``[num_tokens]`` to float32 ``[num_tokens, hidden_size]``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis; all float32."""

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates element ``i`` of each head with element ``i + head_dim / 2``.

        ``x`` is ``[num_tokens, heads, head_dim]``, ``cos`` and ``sin`` are ``[num_tokens, 1, head_dim]``
        float32, the first half of ``sin`` negated. Gives float32.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate_size]``, gate first; float32."""

    def logits(self, hidden: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """The output head: float32 ``[num_rows, hidden_size]`` to float32 ``[num_rows, vocab_size]``."""

    def plan_attention(self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage) -> PagedAttention:
        """Prepares one step's attention. ``spans`` follow each other on the token axis without gaps."""
