"""The numeric operations a device must provide to run a decoder."""

from __future__ import annotations

import abc
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


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer is given of one step beside its input. Made once per step."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim] float32, as Backend.rotary takes it
    sin: torch.Tensor  # the same shape
    attention: PagedAttention


class Backend(abc.ABC):
    """Operations on one device, in one number format.

    A row's result is bitwise the same whichever rows share the step, and however many.

    Layers call the coarse operations at the end, which are composed of the fine ones: a backend may replace
    each by one kernel.
    """

    def __init__(self, number_format: NumberFormat, device: torch.device | None = None) -> None:
        """Weights and KV cache live on ``device``, by default the CPU."""
        self.number_format = number_format
        self.device = device or torch.device("cpu")

    @classmethod
    def suits_this_machine(cls) -> bool:
        """Whether ``auto`` may choose it here. Otherwise it is there for those who ask for it by name."""
        return False

    @classmethod
    @abc.abstractmethod
    def has_float16(cls) -> bool:
        """Whether it computes in the number format float16 on this machine."""

    @property
    @abc.abstractmethod
    def kernels(self) -> str:
        """For people: which kernels compute the linear layers."""

    @abc.abstractmethod
    def vector(self, stored: StoredTensor) -> torch.Tensor:
        """A norm's weight as float32 on the device."""

    @abc.abstractmethod
    def prepack_linear(
        self, weights: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()
    ) -> PackedLinear:
        """Lays linear layers with one input, each ``[out_features, in_features]``, out as one.

        Their outputs follow each other on the last axis. ``biases`` is empty or has one for each. Whether
        quantised weights stay so is the backend's choice. Raises WeightRangeError where it cannot hold a
        weight.
        """

    @abc.abstractmethod
    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``x`` ``[num_tokens, in_features]``, in the activations' dtype."""

    @abc.abstractmethod
    def prepack_head(self, weight: StoredTensor) -> PackedLinear:
        """Lays the output head's ``weight``, ``[vocab_size, hidden_size]``, out for :meth:`logits`.

        Raises as :meth:`prepack_linear`.
        """

    @abc.abstractmethod
    def embedding_table(self, table: StoredTensor) -> EmbeddingTable:
        """``[vocab_size, hidden_size]`` for :meth:`embedding`; quantised or not is the backend's choice."""

    @abc.abstractmethod
    def embedding(self, token_ids: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        """Rows of the table, ``[num_tokens]`` to float32 ``[num_tokens, hidden_size]``."""

    @abc.abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis; all float32."""

    @abc.abstractmethod
    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates element ``i`` of each head with element ``i + head_dim / 2``.

        ``x`` is ``[num_tokens, heads, head_dim]``, ``cos`` and ``sin`` are ``[num_tokens, 1, head_dim]``
        float32, the first half of ``sin`` negated. Gives float32.
        """

    @abc.abstractmethod
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate_size]``, gate first; float32."""

    @abc.abstractmethod
    def logits(self, hidden: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """The output head: float32 ``[num_rows, hidden_size]`` to float32 ``[num_rows, vocab_size]``."""

    @abc.abstractmethod
    def plan_attention(self, spans: Sequence[SequenceSpan], kv_cache: KvCacheStorage) -> PagedAttention:
        """Prepares one step's attention. ``spans`` follow each other on the token axis without gaps."""

    def qkv(
        self, x: torch.Tensor, packed: PackedLinear, num_heads: int, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One linear layer that gives queries, keys and values in this order, split.

        Queries and keys stay together, as both are rotated: ``[num_tokens, num_heads + num_kv_heads,
        head_dim]`` and ``[num_tokens, num_kv_heads, head_dim]`` in the activations' dtype, maybe views.
        """
        heads = self.linear(x, packed).view(x.shape[0], num_heads + 2 * num_kv_heads, -1)
        return heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]

    def rotary_write_attend(
        self, layer: int, query_key: torch.Tensor, value: torch.Tensor, scale: float, context: StepContext
    ) -> torch.Tensor:
        """Rotates queries and keys, stores keys and values in layer ``layer`` of the cache, and attends.

        ``query_key`` and ``value`` are shaped as :meth:`qkv` gives them, in any dtype; the result is float32
        ``[num_tokens, num_heads, head_dim]``, see :meth:`PagedAttention.attend`.
        """
        num_heads = query_key.shape[1] - value.shape[1]
        query_key = self.rotary(query_key, context.cos, context.sin)
        context.attention.write_kv(layer, query_key[:, num_heads:], value)
        return context.attention.attend(layer, query_key[:, :num_heads], scale)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds ``update`` to ``residual`` in place, and gives the sum's :meth:`rms_norm`.

        Both are ``[num_tokens, hidden_size]``, ``residual`` float32, ``update`` of any dtype.
        """
        return self.rms_norm(residual.add_(update), weight, eps)
