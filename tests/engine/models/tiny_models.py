"""Small random models of every supported family, saved by ``transformers`` as a user's folder would be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,  # three query heads per KV head, as in SmolLM2
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_SCALING, "head_dim": 16}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-yarn-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def reference_model(family: str, **changes: Any) -> torch.nn.Module:
    """A ``transformers`` model with random float32 weights, reproducible; ``changes`` are configuration."""
    name, options = FAMILIES[family]
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options, **changes})
    model: torch.nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default initialisation leaves biases 0 and norms 1
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: torch.nn.Module, folder: Path, **options: Any) -> Path:
    """Write the folder; ``max_shard_size`` in ``options`` splits the weights."""
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return folder
