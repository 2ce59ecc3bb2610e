"""What is read of a config.json, and what is said about a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import Llama3Scaling, ModelConfig, ModelConfigError, RopeConfig
from engine.models.hf_config import hf_model_config
from model_files.json_files import ModelFileError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return hf_model_config(folder)


def test_what_a_file_leaves_out_has_the_format_s_defaults(tmp_path: Path) -> None:
    left_out = config_of(tmp_path)
    assert (left_out.num_kv_heads, left_out.head_dim, left_out.rms_norm_eps) == (6, 8, 1e-6)
    assert left_out.rope == RopeConfig(10_000.0)
    nulls = dict.fromkeys(["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_scaling", "mlp_bias"])
    assert config_of(tmp_path, **nulls) == left_out


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_scaling(tmp_path: Path, name: str) -> None:
    table = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = config_of(tmp_path, rope_theta=5e5, **{name: table}).rope
    assert rope == RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))


def test_qwen_names_a_window_that_it_does_not_use(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}
    assert config_of(tmp_path, **qwen).sliding_window is None
    assert config_of(tmp_path, **qwen, use_sliding_window=True).sliding_window == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "48"}, r'config\.json: hidden_size is "48": expected `int`, got `str`'),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings is 1: expected `bool"),
        ({"rope_scaling": {"factor": [2]}}, r"rope_scaling\.factor is \[2\]: expected `float"),
        ({"rope_parameters": 3}, r"rope_parameters is 3: expected `object"),
        ({"eos_token_id": [1, None]}, r"config\.json: eos_token_id\[1\] is null: expected `int`"),
    ],
)
def test_a_field_of_a_wrong_type_is_named_with_its_value(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        config_of(tmp_path, **changes)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 9}')
    with pytest.raises(ModelFileError, match=r"config\.json: object missing required field `hidden_size`"):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["A", "B"]}, r"architectures is \['A', 'B'\]; exactly one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 7}, "hidden_size 48 is not a multiple of 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not implemented"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not implemented"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "longrope"}}, r"rope_scaling\.rope_type 'longrope' is not implemented"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"rope_scaling\.factor is 0\.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, r"rope_scaling\.low_freq_factor is missing"),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        config_of(tmp_path, **changes)
