"""The decoder against ``transformers``: float32 logits of whole prompts agree to 1e-3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.batch import Batch, ScheduledSequence
from engine.kv_cache_storage import KvCacheStorage
from engine.model_runner import ModelRunner, kv_layout
from engine.models.config import ModelConfigError
from engine.models.gguf_config import gguf_model_config
from engine.models.load import load_model
from engine.ops.cpu import CpuBackend
from engine.ops.number_formats import FLOAT32
from engine.weights.dequantize import dequantize
from engine.weights.errors import WeightError
from engine.weights.gguf_weights import GgufWeights
from model_files.gguf import GgufFile
from model_files.model_source import ModelSource, resolve_model
from tests.engine.models.tiny_models import FAMILIES, reference_model, save

TOLERANCE = 1e-3


def logits_of(source: ModelSource, token_ids: list[int]) -> torch.Tensor:
    """Our float32 logits after each position [num_tokens, vocab_size]: a prompt chunk, then single tokens."""
    model = load_model(source, backend=CpuBackend(FLOAT32))
    layout = kv_layout(model.config, 16, "float32")
    num_blocks = -(-len(token_ids) // 16)
    runner = ModelRunner(model, KvCacheStorage(layout, num_blocks + 1))
    rows = []
    for position in range(len(token_ids)):
        batch = Batch(
            (
                ScheduledSequence(
                    request_id="r",
                    token_ids=token_ids[position : position + 1],
                    start=position,
                    block_ids=tuple(range(1, num_blocks + 1)),
                    num_logits=1,
                ),
            )
        )
        rows.append(runner.forward(batch))
    return torch.cat(rows)


def reference_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tiny_models_of_every_family(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    folder = save(reference, tmp_path / family)
    token_ids = [(7 * position + 3) % 97 for position in range(83)]
    ours = logits_of(ModelSource("hf", folder, family), token_ids)
    expected = reference_logits(reference, token_ids)
    assert expected.abs().max() > 0.5, "the comparison would mean little"
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def test_sharded_weights(tmp_path: Path) -> None:
    reference = reference_model("llama")
    folder = save(reference, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    token_ids = [5, 9, 40, 3]
    ours = logits_of(ModelSource("hf", folder, "sharded"), token_ids)
    torch.testing.assert_close(ours, reference_logits(reference, token_ids), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_the_bundled_model() -> None:
    source = resolve_model("smollm2-135m-instruct")
    with GgufFile.open(source.path) as file:
        config = gguf_model_config(file)
        weights = GgufWeights(file, config)
        state = {name: dequantize([weights.read(name)], torch.float32) for name in weights.names()}
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    ).eval()
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    reference.tie_weights()
    token_ids = [1, 9690, 198, 2683, 359, 260, 5575, 282, 4649, 47] * 4
    ours = logits_of(source, token_ids)
    expected = reference_logits(reference, token_ids)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert (ours.argmax(-1) == expected.argmax(-1)).all()


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(reference_model("llama"), tmp_path / "other")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(ModelConfigError, match="MambaForCausalLM"):
        logits_of(ModelSource("hf", folder, "other"), [1])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save(reference_model("qwen2"), tmp_path / "qwen")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises((WeightError, ModelConfigError), match=r"model\.layers\.2|layer_types"):
        logits_of(ModelSource("hf", folder, "qwen"), [1])
