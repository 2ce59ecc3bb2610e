"""Models in GGUF files as llama.cpp's converter writes them, against ``transformers``."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from engine.models.config import ModelConfigError
from engine.models.load import load_model_config
from engine.weights.errors import WeightError
from model_files.model_source import ModelSource
from tests.engine.models.test_reference_logits import TOLERANCE, logits_of, reference_logits
from tests.engine.models.tiny_models import COMMON, FAMILIES, reference_model
from tests.model_files.gguf_writer import write_gguf

Tensors = dict[str, tuple[tuple[int, ...], int, bytes]]
F32 = 0
ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
NAMES = {
    r"model\.embed_tokens\.weight": "token_embd.weight",
    r"model\.norm\.weight": "output_norm.weight",
    r"lm_head\.weight": "output.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"blk.\1.attn_norm.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blk.\1.ffn_norm.",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.": r"blk.\1.attn_\2_norm.",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.": r"blk.\1.attn_\2.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"blk.\1.attn_output.",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.": r"blk.\1.ffn_\2.",
}


def permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the converter does to the query and key rows of Llama models."""
    half = rows.shape[0] // num_heads // 2
    return rows.view(num_heads, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def converted(family: str, model: torch.nn.Module) -> tuple[dict[str, object], Tensors]:
    """Metadata and tensors of the GGUF file of a tiny model."""
    name, options = FAMILIES[family]
    architecture = ARCHITECTURES[name]
    values = {**COMMON, **options}
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_dim = values.get("head_dim", values["hidden_size"] // heads)
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.vocab_size": values["vocab_size"],
        f"{architecture}.context_length": values["max_position_embeddings"],
        f"{architecture}.embedding_length": values["hidden_size"],
        f"{architecture}.block_count": values["num_hidden_layers"],
        f"{architecture}.feed_forward_length": values["intermediate_size"],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 10000.0,
    }
    tensors: Tensors = {}
    for hf_name, parameter in model.state_dict().items():
        if hf_name == "lm_head.weight" and values["tie_word_embeddings"]:
            continue
        gguf_name = hf_name
        for pattern, replacement in NAMES.items():
            gguf_name = re.sub(pattern, replacement, gguf_name)
        if architecture == "llama" and ".attn_q." in gguf_name:
            parameter = permute(parameter, heads)
        if architecture == "llama" and ".attn_k." in gguf_name:
            parameter = permute(parameter, kv_heads)
        data = parameter.float().contiguous().numpy().tobytes()
        tensors[gguf_name] = (tuple(parameter.shape), F32, data)
    return metadata, tensors


def source_of(path: Path, metadata: Mapping[str, object], tensors: Tensors) -> ModelSource:
    return ModelSource("gguf", write_gguf(path / "m.gguf", metadata, tensors), "m")


@pytest.mark.parametrize("family", ["llama", "llama-tied-mha", "llama-mqa", "mistral", "qwen2", "qwen3"])
def test_converted_models(family: str, tmp_path: Path) -> None:
    model = reference_model(family)
    source = source_of(tmp_path, *converted(family, model))
    token_ids = [(5 * position + 1) % 97 for position in range(40)]
    ours, expected = logits_of(source, token_ids), reference_logits(model, token_ids)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def test_llama_3_1_scaling_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    model = reference_model("llama3-rope")
    metadata, tensors = converted("llama3-rope", model)
    plain = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    scaled = model.model.rotary_emb.inv_freq.double()  # type: ignore[union-attr]
    divisors = (plain / scaled).tolist()
    assert max(divisors) > 2
    tensors["rope_freqs.weight"] = ((8,), F32, struct.pack("<8f", *divisors))
    token_ids = [(5 * position + 1) % 97 for position in range(70)]
    ours = logits_of(source_of(tmp_path, metadata, tensors), token_ids)
    torch.testing.assert_close(ours, reference_logits(model, token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 4}, "4 of 8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.attention.head_count_kv": 4}, "not a multiple"),
    ],
)
def test_what_is_not_implemented_is_named(change: dict[str, object], named: str, tmp_path: Path) -> None:
    metadata, tensors = converted("llama", reference_model("llama"))
    with pytest.raises(ModelConfigError, match=named):
        load_model_config(source_of(tmp_path, {**metadata, **change}, tensors))


def test_an_unknown_a_missing_and_an_unreadable_tensor_are_named(tmp_path: Path) -> None:
    metadata, tensors = converted("llama", reference_model("llama"))
    extra = {**tensors, "blk.0.ssm_conv.weight": ((4,), F32, bytes(16))}
    with pytest.raises(WeightError, match=r"blk\.0\.ssm_conv\.weight"):
        logits_of(source_of(tmp_path, metadata, extra), [1])
    fewer = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        logits_of(source_of(tmp_path, metadata, fewer), [1])
    q2_k = {**tensors, "blk.1.ffn_up.weight": ((1, 256), 10, bytes(84))}
    with pytest.raises(WeightError, match="Q2_K"):
        logits_of(source_of(tmp_path, metadata, q2_k), [1])
