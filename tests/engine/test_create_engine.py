"""From files and settings to a running engine, and what is refused on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.block_hash import hash_blocks, root_hash
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import SequenceSpec
from engine.create_engine import CreatedEngine, create_engine
from engine.engine import Engine
from engine.new_request import NewRequest
from engine.ops.number_formats import FLOAT32, WeightRangeError, has_float16_linear, number_formats
from engine.ops.registry import BACKEND_NAMES
from engine.step_result import SequenceOutput
from model_files.gguf import GgufFile
from model_files.json_files import ModelFileError
from model_files.model_source import (
    BUNDLED_MODEL,
    ModelNotFoundError,
    ModelSource,
    model_fingerprint,
    resolve_model,
)
from tests.engine.formats import FORMATS
from tests.engine.models.test_gguf_models import converted
from tests.engine.models.tiny_models import COMMON, reference_model, save
from tests.engine.scheduler_config import SCHEDULER_CONFIG
from tests.model_files.gguf_writer import write_gguf
from text_pipeline.text_model import TextModel, load_text_model

BLOCK_SIZE = 16
# Two layers of two KV heads of eight elements, K and V, float32.
BLOCK_BYTES = 2 * 2 * 2 * 8 * BLOCK_SIZE * 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = save(reference_model("llama"), Path(tmp_path_factory.mktemp("llama")))
    return ModelSource("hf", folder, "tiny")


def create(source: ModelSource, **changes: Any) -> CreatedEngine:
    settings: dict[str, Any] = {
        "backend": "auto",
        "dtype": "float32",
        "max_model_len": None,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": 40 * BLOCK_BYTES,
        "kv_cache_dtype": "auto",
        "scheduler_config": SCHEDULER_CONFIG,
        "prefix_caching": True,
    }
    return create_engine(source, **(settings | changes))


def run(
    engine: Engine, prompt: list[int], max_tokens: int, *, request_id: str = "r", **fields: Any
) -> list[SequenceOutput]:
    """All outputs of one greedy request; ``fields`` are of its SamplingParams."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **fields)
    engine.add_request(
        NewRequest(request_id=request_id, spec=SequenceSpec(prompt_token_ids=prompt, sampling=sampling)),
        now=0.0,
    )
    outputs: list[SequenceOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        assert engine.has_work()
        outputs.extend(engine.step(now=0.0).outputs)
    return outputs


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_everything_the_process_must_know(tiny: ModelSource) -> None:
    created = create(tiny)
    assert created.vocab_size == COMMON["vocab_size"]
    assert created.eos_token_ids == (2,)
    assert created.max_model_len == COMMON["max_position_embeddings"]
    assert created.number_format is FLOAT32
    assert "float32" in created.kernels
    assert created.model_fingerprint == model_fingerprint(tiny)
    assert created.kv_layout.block_bytes == BLOCK_BYTES
    assert created.storage.layout == created.kv_layout
    assert created.storage.num_blocks == 40
    assert created.engine.load().kv.blocks_total == 39, "block 0 is nobody's"


@pytest.mark.parametrize("backend", ["auto", *BACKEND_NAMES])
def test_it_generates_what_the_model_says(tiny: ModelSource, backend: str) -> None:
    prompt = [1, 17, 42, 8, 90, 3]
    generated = tokens_of(run(create(tiny, backend=backend).engine, prompt, max_tokens=6))
    reference, tokens = reference_model("llama"), list(prompt)
    while len(tokens) < len(prompt) + 6 and tokens[-1] != 2:
        with torch.inference_mode():
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert generated == tokens[len(prompt) :]


def test_cache_memory_is_used_in_whole_blocks(tiny: ModelSource) -> None:
    created = create(tiny, kv_cache_memory=7 * BLOCK_BYTES - 1)
    assert created.storage.num_blocks == 6
    assert created.storage.num_bytes == 6 * BLOCK_BYTES


def test_longest_sequence_is_what_the_cache_holds(tiny: ModelSource) -> None:
    created = create(tiny, kv_cache_memory=4 * BLOCK_BYTES, max_model_len=200)
    assert created.max_model_len == 3 * BLOCK_SIZE
    outputs = run(created.engine, [5] * (3 * BLOCK_SIZE - 4), max_tokens=100, ignore_eos=True)
    assert len(tokens_of(outputs)) == 4
    assert outputs[-1].finish_reason == "length"


def test_configured_length_wins_over_a_larger_cache(tiny: ModelSource) -> None:
    assert create(tiny, max_model_len=50).max_model_len == 50


@pytest.mark.parametrize("memory", [0, 1, 2 * BLOCK_BYTES - 1, -BLOCK_BYTES])
def test_memory_below_two_blocks_is_refused(tiny: ModelSource, memory: int) -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_memory is {memory} bytes") as caught:
        create(tiny, kv_cache_memory=memory)
    for number in (f"one block of {BLOCK_SIZE} tokens", f"takes {BLOCK_BYTES} ", f"least {2 * BLOCK_BYTES}"):
        assert number in str(caught.value)


def test_more_memory_than_an_address_space_holds_is_refused(tiny: ModelSource) -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_memory is {1 << 60} bytes, and this machine cannot"):
        create(tiny, kv_cache_memory=1 << 60)


def test_smallest_cache_runs_a_request(tiny: ModelSource) -> None:
    created = create(tiny, kv_cache_memory=2 * BLOCK_BYTES)
    assert created.max_model_len == BLOCK_SIZE
    assert len(tokens_of(run(created.engine, [5, 6], max_tokens=1))) == 1


def test_blocks_of_one_token_need_a_third(tiny: ModelSource) -> None:
    block_bytes = BLOCK_BYTES // BLOCK_SIZE
    with pytest.raises(ValueError, match=rf"give it at least {3 * block_bytes}"):
        create(tiny, block_size=1, kv_cache_memory=2 * block_bytes)
    created = create(tiny, block_size=1, kv_cache_memory=3 * block_bytes)
    assert len(tokens_of(run(created.engine, [5], max_tokens=1))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"backend": "abacus"}, "backend 'abacus' is unknown; known are auto, cpu, reference"),
        (
            {"dtype": "float8"},
            "dtype 'float8' is not supported; supported are auto, float32, float16, bfloat16",
        ),
        ({"kv_cache_dtype": "int4"}, "dtype is 'int4', must be one of float32, bfloat16, float16"),
        ({"max_model_len": 257}, "max_model_len 257 is outside 1 to 256"),
        ({"max_model_len": 0}, "max_model_len 0 is outside 1 to 256"),
        ({"max_model_len": 1}, "max_model_len is 1, must be at least 2"),
    ],
)
def test_impossible_settings_are_refused(tiny: ModelSource, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(tiny, **changes)


def test_missing_weights_are_refused(tiny: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny.path / "config.json").read_bytes())
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors file"):
        create(ModelSource("hf", tmp_path, "empty"))


def test_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json is not valid JSON"):
        create(ModelSource("hf", tmp_path, "broken"))


@pytest.mark.parametrize("dtype", ["auto", *(number_format.name for number_format in FORMATS)])
def test_dtype_of_model_and_cache(tiny: ModelSource, dtype: str) -> None:
    created = create(tiny, dtype=dtype)
    expected = number_formats(dtype, has_float16=has_float16_linear())[0]
    assert created.number_format is expected
    assert created.storage.tensor.dtype is expected.weights
    assert len(tokens_of(run(created.engine, [5, 6, 7], max_tokens=1))) == 1


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_caches_dtype_is_its_own(tiny: ModelSource, dtype: str, kv_cache_dtype: str) -> None:
    prompt = [1, 17, 42, 8, 90, 3, 3, 61] * 5
    ours, reference = (
        create(tiny, backend=backend, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        for backend in ("auto", "reference")
    )
    assert ours.kv_layout.dtype == kv_cache_dtype
    assert ours.number_format in number_formats(dtype, has_float16=has_float16_linear())
    expected = tokens_of(run(reference.engine, prompt, max_tokens=8, ignore_eos=True))
    assert tokens_of(run(ours.engine, prompt, max_tokens=8, ignore_eos=True)) == expected


def test_float16_without_kernels_for_it_is_refused(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.cpu.has_float16_linear", lambda: False)
    with pytest.raises(ValueError, match="float16' needs an x86-64 processor with AVX2"):
        create(tiny, dtype="float16")
    assert create(tiny, dtype="auto").number_format is FLOAT32


@pytest.mark.skipif(not has_float16_linear(), reason="this processor has no float16 kernels")
@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj", "layers.0.self_attn.k_proj", "lm_head"])
def test_a_weight_beyond_float16s_range(
    name: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for by name it is an error that names the tensor; ``auto`` takes float32 and says why."""
    model = reference_model("llama")
    parameter = dict(model.named_parameters())[
        "lm_head.weight" if name == "lm_head" else f"model.{name}.weight"
    ]
    with torch.no_grad():
        parameter[0, 0] = -70_000.0
    source = ModelSource("hf", save(model, tmp_path / "large"), "large")
    shown = "output head" if name == "lm_head" else name
    with pytest.raises(WeightRangeError, match=rf"{shown}.*beyond float16's 65,504"):
        create(source, backend=backend, dtype="float16")
    assert create(source, backend=backend, dtype="auto").number_format is FLOAT32
    assert "float32 instead of float16" in caplog.text


@pytest.mark.parametrize("dtype", [number_format.name for number_format in FORMATS])
@pytest.mark.parametrize("backend", [name for name in BACKEND_NAMES if name != "reference"])
def test_backends_agree_with_the_reference(tiny: ModelSource, backend: str, dtype: str) -> None:
    prompt = [1, 17, 42, 8, 90, 3, 3, 61] * 5
    ours, reference = (
        run(create(tiny, backend=name, dtype=dtype).engine, prompt, max_tokens=12, ignore_eos=True)
        for name in (backend, "reference")
    )
    assert tokens_of(ours) == tokens_of(reference)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_prefix_caching_is_a_setting(tiny: ModelSource, prefix_caching: bool) -> None:
    engine = create(tiny, prefix_caching=prefix_caching).engine
    prompt = list(range(3, 3 + 3 * BLOCK_SIZE))
    first = run(engine, prompt, max_tokens=3, request_id="first")
    second = run(engine, prompt, max_tokens=3, request_id="second")
    assert tokens_of(first) == tokens_of(second)
    assert second[0].num_cached_tokens == (2 * BLOCK_SIZE if prefix_caching else 0)
    assert bool(engine.cached_block_hashes()) is prefix_caching


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_hashes_are_those_of_model_and_block_size(tiny: ModelSource, dtype: str) -> None:
    created = create(tiny, dtype=dtype)
    prompt = list(range(3, 3 + 2 * BLOCK_SIZE + 1))
    run(created.engine, prompt, max_tokens=1)
    assert created.kv_layout.dtype == dtype
    root = root_hash(created.model_fingerprint, BLOCK_SIZE)
    assert sorted(created.engine.cached_block_hashes()) == sorted(hash_blocks(prompt, BLOCK_SIZE, root))


def test_a_chat_model_in_gguf_ends_with_its_turn(tmp_path: Path) -> None:
    """Its file names only the end of a text as EOS; the chat template ends turns with another token."""
    metadata, tensors = converted("llama", reference_model("llama"))
    end_of_text, end_of_turn = 0, 5
    tokens = [f"t{index}" for index in range(COMMON["vocab_size"])]
    tokens[end_of_text], tokens[end_of_turn] = "<|endoftext|>", "<|im_end|>"
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.eos_token_id": end_of_text,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}",
    }
    created = create(ModelSource("gguf", write_gguf(tmp_path / "m.gguf", metadata, tensors), "m"))
    assert created.eos_token_ids == (end_of_text, end_of_turn)
    outputs = run(created.engine, [7, 8, 9], max_tokens=8, logit_bias={end_of_turn: 100.0})
    assert (tokens_of(outputs), outputs[-1].finish_reason) == ([end_of_turn], "stop")


def text_of(source: ModelSource) -> TextModel:
    with GgufFile.open(source.path) as file:
        return load_text_model("gguf", source.path, file.metadata)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_bundled_model_answers_the_readmes_question(dtype: str) -> None:
    """Rounded to bfloat16 it does not: two first tokens come to the same logit, and the answer runs away."""
    source = resolve_model(BUNDLED_MODEL)
    created, text = create(source, dtype=dtype, kv_cache_memory=64 << 20, max_model_len=1024), text_of(source)
    prompt = text.render_chat([{"role": "user", "content": "What is the capital of France?"}]).encode()
    outputs = run(created.engine, prompt, max_tokens=40)
    answer, end = tokens_of(outputs)[:-1], tokens_of(outputs)[-1]
    assert text.tokenizer.decode(answer) == "The capital of France is Paris."
    assert outputs[-1].finish_reason == "stop", "it ends its answer by itself"
    (end_of_turn,) = text.tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=True)
    assert end == end_of_turn
    assert end in created.eos_token_ids
    assert created.vocab_size == 49152
