"""The tensors of a GGUF file under the names and in the row order that the decoder expects."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from engine.models.config import ModelConfig
from engine.models.gguf_config import ROPE_DIVISORS_TENSOR
from engine.weights.dequantize import SUPPORTED_TYPES
from engine.weights.errors import WeightError
from engine.weights.stored_tensor import StoredTensor
from model_files.gguf import GgufFile

_GLOBAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_LAYER_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
# Read with the configuration, or of no use for inference.
_NOT_PARAMETERS = frozenset({ROPE_DIVISORS_TENSOR})
# Architectures whose converter reorders query and key rows for rotation of neighbouring pairs.
_PERMUTED_ARCHITECTURES = frozenset({"llama"})


def canonical_name(gguf_name: str) -> str | None:
    """The decoder's name of a GGUF tensor, None where the decoder has no such parameter."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_MODULES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_MODULES[match[2]]}.{match[3]}"


def unpermute_rows(stored: StoredTensor, num_heads: int) -> StoredTensor:
    """Undoes the row order of Llama GGUF files.

    ``stored`` is ``[num_heads * head_dim, ...]``. Within a head, stored row ``2 i`` belongs to position ``i``
    and stored row ``2 i + 1`` to position ``head_dim / 2 + i``: pairs that rotate together are neighbours in
    the file and half a head apart in the decoder. Rows are moved as they are stored, quantised or not.
    """
    pairs = stored.data.reshape(num_heads, stored.shape[0] // num_heads // 2, 2, -1)
    data = pairs.swapaxes(1, 2).reshape(stored.data.shape)
    return StoredTensor(stored.type_name, stored.shape, data)


class GgufWeights:
    """A WeightSource over an open GGUF file.

    Raises WeightError at construction for a tensor whose name or type is not known.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._stored_names: dict[str, str] = {}
        for stored in file.tensors.values():
            if stored.name in _NOT_PARAMETERS:
                continue
            name = canonical_name(stored.name)
            if name is None:
                raise WeightError(f"{file.path}: unknown tensor {stored.name!r}")
            if stored.type_name not in SUPPORTED_TYPES:
                raise WeightError(
                    f"{file.path}: the tensor {stored.name!r} has the type {stored.type_name}; "
                    f"readable are {', '.join(SUPPORTED_TYPES)}"
                )
            self._stored_names[name] = stored.name

    @property
    def location(self) -> Path:
        """The file."""
        return self._file.path

    def file_of(self, name: str) -> Path:
        """The file. Raises KeyError for an unknown name."""
        return self._file.path

    def names(self) -> Collection[str]:
        """Canonical names of all parameters in the file."""
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape of the parameter ``name``. Raises KeyError."""
        return self._file.tensors[self._stored_names[name]].shape

    def read(self, name: str) -> StoredTensor:
        """The parameter ``name`` as stored, its rows in the decoder's order. Raises KeyError.

        Raises WeightError for a vector whose elements would have to be moved out of quantised blocks.
        """
        entry = self._file.tensors[self._stored_names[name]]
        data = np.frombuffer(self._file.data(entry.name), dtype=np.uint8).reshape(*entry.shape[:-1], -1)
        stored = StoredTensor(entry.type_name, entry.shape, data)
        num_heads = self._num_permuted_heads(name)
        if num_heads is None:
            return stored
        if stored.is_quantised and len(stored.shape) == 1:
            raise WeightError(
                f"{self._file.path}: the tensor {entry.name!r} is a vector of type {entry.type_name}; plain "
                "numbers were expected"
            )
        return unpermute_rows(stored, num_heads)

    def _num_permuted_heads(self, name: str) -> int | None:
        if self._config.architecture in _PERMUTED_ARCHITECTURES:
            if ".self_attn.q_proj." in name:
                return self._config.num_heads
            if ".self_attn.k_proj." in name:
                return self._config.num_kv_heads
        return None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
