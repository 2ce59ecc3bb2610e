"""The parts of all ranks are the whole, for every stored type; what cannot be split is said by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.models.gguf_config import gguf_model_config
from engine.weights.dequantize import SUPPORTED_TYPES, dequantize
from engine.weights.errors import ShardError, WeightError
from engine.weights.gguf_weights import GgufWeights
from engine.weights.safetensors_weights import SafetensorsWeights
from engine.weights.source import WeightReader
from engine.weights.stored_tensor import Shard, StoredTensor
from model_files.gguf import TENSOR_TYPES, GgufFile
from tests.engine.models.test_gguf_models import converted
from tests.engine.models.tiny_models import reference_model
from tests.engine.stored import SIZES, stored_as
from tests.engine.weights.test_dequantize import random_blocks
from tests.model_files.gguf_writer import write_gguf


@st.composite
def tensors(draw: st.DrawFn) -> tuple[StoredTensor, int, int]:
    """A tensor of any type, a dimension, and a number of ranks that share it evenly."""
    type_name = draw(st.sampled_from(SUPPORTED_TYPES))
    world_size, dim = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    units = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    units[dim] *= world_size
    elements, num_bytes = SIZES[type_name]
    num_blocks = units[0] * units[1]
    if elements > 1:
        data = random_blocks(type_name, num_blocks, seed=draw(st.integers(0, 99)))
    else:
        data = draw(st.binary(min_size=num_blocks * num_bytes, max_size=num_blocks * num_bytes))
    return stored_as(type_name, (units[0], units[1] * elements), data), dim, world_size


@given(tensors())
def test_the_parts_of_all_ranks_are_the_whole(case: tuple[StoredTensor, int, int]) -> None:
    whole, dim, world_size = case
    parts = [whole.part(Shard(dim, rank, world_size)) for rank in range(world_size)]
    assert {part.shape for part in parts} == {parts[0].shape}
    assert np.array_equal(np.concatenate([part.data for part in parts], axis=dim), whole.data)
    values = torch.cat([dequantize([part], torch.float32) for part in parts], dim=dim)
    # Equal to the bit but for NaN, whose payload torch converts differently in the rest of a vector loop.
    torch.testing.assert_close(values, dequantize([whole], torch.float32), rtol=0, atol=0, equal_nan=True)


def test_a_vector_is_split_by_its_elements() -> None:
    vector = stored_as("BF16", (6,), bytes(range(12)))
    assert vector.part(Shard(0, 1, 3)).data.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("type_name", [name for name in SUPPORTED_TYPES if SIZES[name][0] > 1])
def test_quantised_rows_are_split_between_blocks_only(type_name: str) -> None:
    elements, num_bytes = SIZES[type_name]
    whole = stored_as(type_name, (2, 3 * elements), bytes(6 * num_bytes))
    assert whole.part(Shard(1, 2, 3)).shape == (2, elements)
    with pytest.raises(ShardError, match=f"end of a {type_name} block of {elements}"):
        whole.part(Shard(1, 0, 2))
    with pytest.raises(ShardError, match="evenly over 7 ranks"):
        whole.part(Shard(1, 0, 7))


def test_impossible_parts_are_refused() -> None:
    with pytest.raises(ShardError, match="no dimension 2"):
        stored_as("F32", (2, 2), bytes(16)).part(Shard(2, 0, 2))
    for wrong in ((0, 2, 2), (0, -1, 2), (0, 0, 0), (-1, 0, 1)):
        with pytest.raises(ValueError, match="no such part"):
            Shard(*wrong)


def test_heads_of_ranks_come_in_the_decoders_order(tmp_path: Path) -> None:
    """A Llama file has the rows of queries and keys in another order, which ends with each head."""
    model = reference_model("llama")
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = dict(model.named_parameters())[name].detach()
    rows = expected.shape[0] // 3
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", *converted("llama", model))) as file:
        weights = GgufWeights(file, gguf_model_config(file))
        for rank in range(3):
            part = WeightReader(weights).take(name, tuple(expected.shape), Shard(0, rank, 3))
            values = dequantize([part], torch.float32)
            assert torch.equal(values, expected[rows * rank : rows * (rank + 1)])


def test_safetensors_are_split_as_they_are_stored(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6).bfloat16()
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path)
    part = WeightReader(weights).take("a", (4, 6), Shard(1, 1, 2))
    assert (part.type_name, part.shape) == ("BF16", (4, 3))
    assert torch.equal(dequantize([part], torch.bfloat16), tensor[:, 3:])
    weights.close()


def test_errors_name_file_tensor_and_what_was_found(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(4, 6)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path)
    with pytest.raises(WeightError) as wrong_shape:
        WeightReader(weights).take("layer.weight", (6, 4))
    assert str(wrong_shape.value) == (
        f"{tmp_path / 'model.safetensors'}: the tensor 'layer.weight' has the shape [4, 6], the model's "
        "configuration asks for [6, 4]"
    )
    with pytest.raises(WeightError) as missing:
        WeightReader(weights).take("layer.weights", (4, 6))
    assert str(missing.value) == (
        f"{tmp_path}: the tensor 'layer.weights' of shape [4, 6] is missing; "
        "similar are 'layer.weight' [4, 6]"
    )
    with pytest.raises(WeightError, match="none of its 1 is similar"):
        WeightReader(weights).take("norm", (4,))
    with pytest.raises(ShardError, match=r"model\.safetensors: the tensor 'layer\.weight' cannot"):
        WeightReader(weights).take("layer.weight", (4, 6), Shard(0, 0, 3))
    weights.close()


def test_a_quantised_vector_that_must_be_reordered_is_refused(tmp_path: Path) -> None:
    metadata, tensors = converted("llama", reference_model("llama"))
    q8_0 = next(number for number, kind in TENSOR_TYPES.items() if kind.name == "Q8_0")
    tensors["blk.0.attn_q.bias"] = ((64,), q8_0, bytes(68))
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", metadata, tensors)) as file:
        weights = GgufWeights(file, gguf_model_config(file))
        with pytest.raises(WeightError, match=r"'blk\.0\.attn_q\.bias' is a vector of type Q8_0"):
            weights.read("model.layers.0.self_attn.q_proj.bias")
