"""A sequence's logits depend on its own tokens only: bit for bit, whatever shares the step."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, ScheduledSequence
from engine.kv_cache_storage import KvCacheStorage
from engine.model_runner import ModelRunner, kv_layout
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.ops.cpu import CpuBackend
from engine.ops.number_formats import FLOAT32, NumberFormat, resolve_kv_cache_dtype
from engine.ops.reference import ReferenceBackend
from model_files.model_source import BUNDLED_MODEL, ModelSource, resolve_model
from tests.engine.formats import FORMATS, name_of
from tests.engine.models.tiny_models import reference_model, save

BLOCK_SIZE = 16
NUM_BLOCKS = 200


HEAD_DIMS = [64, 96, 128, 192, 256]


@functools.cache
def bundled(number_format: NumberFormat) -> Decoder:
    return load_model(resolve_model(BUNDLED_MODEL), backend=CpuBackend(number_format))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models with odd widths (the remainders of vector loops), by head size."""
    return {
        head_dim: save(
            reference_model("qwen3", head_dim=head_dim, hidden_size=50, intermediate_size=83),
            Path(tmp_path_factory.mktemp(f"qwen3-{head_dim}")),
        )
        for head_dim in HEAD_DIMS
    }


@pytest.fixture(params=HEAD_DIMS)
def head_dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=FORMATS, ids=name_of)
def number_format(request: pytest.FixtureRequest) -> NumberFormat:
    assert isinstance(request.param, NumberFormat)
    return request.param


@pytest.fixture
def odd(folders: dict[int, Path], head_dim: int, number_format: NumberFormat) -> Decoder:
    """Each head size in each number format."""
    return load_model(ModelSource("hf", folders[head_dim], "odd"), backend=CpuBackend(number_format))


@pytest.fixture(scope="module")
def tiny(folders: dict[int, Path]) -> Decoder:
    return load_model(ModelSource("hf", folders[64], "tiny"), backend=CpuBackend(FLOAT32))


class Driver:
    """Runs sequences through a fresh KV cache with block tables in random order."""

    def __init__(self, model: Decoder, seed: int = 0) -> None:
        dtype = resolve_kv_cache_dtype("auto", model.backend.number_format)
        layout = kv_layout(model.config, BLOCK_SIZE, dtype)
        storage = KvCacheStorage(layout, NUM_BLOCKS)
        # What was never computed must not matter, whatever it holds.
        storage.tensor.fill_(float("nan"))
        self.runner = ModelRunner(model, storage)
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}

    def part(self, name: str, tokens: list[int], start: int, end: int) -> ScheduledSequence:
        table = self.tables.setdefault(name, [])
        while len(table) * BLOCK_SIZE < end:
            table.append(self.free.pop())
        return ScheduledSequence(
            request_id=name,
            token_ids=tokens[start:end],
            start=start,
            block_ids=tuple(table),
            num_logits=1,
        )

    def step(self, *parts: ScheduledSequence) -> torch.Tensor:
        return self.runner.forward(Batch(parts))


def tokens_of(model: Decoder, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(model.config.vocab_size), k=length)


def alone(model: Decoder, prompt: list[int], decoded: list[int]) -> list[torch.Tensor]:
    """Logits of a prompt in one chunk and then of single tokens."""
    driver, tokens = Driver(model), prompt + decoded
    rows = [driver.step(driver.part("a", tokens, 0, len(prompt)))[0]]
    for position in range(len(prompt), len(tokens)):
        rows.append(driver.step(driver.part("a", tokens, position, position + 1))[0])
    return rows


def check_in_company(model: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    prompt, decoded = tokens_of(model, rng.randrange(20, 90), seed), tokens_of(model, 4, seed + 1)
    expected = alone(model, prompt, decoded)
    driver, tokens = Driver(model, seed), prompt + decoded
    others = {f"o{index}": tokens_of(model, 120, index) for index in range(5)}
    done = dict.fromkeys(others, 0)

    def company() -> list[ScheduledSequence]:
        parts = []
        for name, other in others.items():
            if rng.random() < 0.7 and done[name] < 100:
                end = done[name] + rng.choice((1, 1, 3, 17))
                parts.append(driver.part(name, other, done[name], end))
                done[name] = end
        return parts

    start = 0
    while start < len(prompt):
        end = min(len(prompt), start + rng.randrange(1, 40))
        before, after = company(), company()
        row = driver.step(*before, driver.part("a", tokens, start, end), *after)[len(before)]
        start = end
    assert torch.equal(row, expected[0]), "prompt"
    for index, position in enumerate(range(len(prompt), len(tokens))):
        before, after = company(), company()
        row = driver.step(*before, driver.part("a", tokens, position, position + 1), *after)[len(before)]
        assert torch.equal(row, expected[index + 1]), f"decoded token {index}"


def check_recomputed(model: Decoder) -> None:
    tokens = tokens_of(model, 46, 3)
    decoded = alone(model, tokens[:40], tokens[40:])[-1]
    assert torch.equal(decoded, alone(model, tokens, [])[-1])


def check_batch_sizes(model: Decoder, sizes: list[int]) -> None:
    """A token decoded alone, and beside 1 to 127 others that decode as well."""
    driver, tokens = Driver(model), tokens_of(model, 21, 5)
    others = {f"o{index}": tokens_of(model, 6, index) for index in range(max(sizes) - 1)}
    driver.step(*(driver.part(name, other, 0, 5) for name, other in others.items()))
    driver.step(driver.part("a", tokens, 0, 20))
    last = driver.part("a", tokens, 20, 21)
    expected = driver.step(last)[0]
    decoding = [driver.part(name, other, 5, 6) for name, other in others.items()]
    for size in sizes:
        assert torch.equal(driver.step(*decoding[: size - 1], last)[-1], expected), f"batch of {size}"
        assert torch.equal(driver.step(last, *decoding[: size - 1])[0], expected), f"batch of {size}, first"


BATCH_SIZES = [*range(2, 9), 13, 14, 31, 32, 37, 38, 128]


def test_company_and_chunks_change_no_bit(odd: Decoder) -> None:
    check_in_company(odd, 0)


def test_decoding_gives_the_same_bits_as_recomputing_after_preemption(odd: Decoder) -> None:
    check_recomputed(odd)


def test_the_size_of_the_batch_changes_no_bit(odd: Decoder) -> None:
    check_batch_sizes(odd, BATCH_SIZES)


def test_chunks_of_every_small_size_change_no_bit(odd: Decoder) -> None:
    tokens = tokens_of(odd, 40, 9)
    expected = alone(odd, tokens, [])[-1]
    for size in (1, 2, 3, 5, 7, 31, 33):
        driver = Driver(odd)
        for start in range(0, len(tokens), size):
            row = driver.step(driver.part("a", tokens, start, min(len(tokens), start + size)))[0]
        assert torch.equal(row, expected), f"chunks of {size}"


@pytest.mark.parametrize("num_threads", [2, 5])
def test_the_same_with_several_threads(tiny: Decoder, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        check_in_company(tiny, 3)
        check_recomputed(tiny)
        check_batch_sizes(tiny, [3, 8])
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_the_bundled_model(number_format: NumberFormat) -> None:
    model = bundled(number_format)
    check_in_company(model, 0)
    check_recomputed(model)
    check_batch_sizes(model, [2, 7, 14, 37])


def test_only_asked_rows_come_back_in_order(tiny: Decoder) -> None:
    driver = Driver(tiny)
    one, two, three = (tokens_of(tiny, 9, seed) for seed in (1, 2, 3))
    parts = [driver.part(name, tokens, 0, 9) for name, tokens in (("1", one), ("2", two), ("3", three))]
    middle = ScheduledSequence(
        request_id="2", token_ids=two, start=0, block_ids=parts[1].block_ids, num_logits=0
    )
    rows = driver.step(parts[0], middle, parts[2])
    assert rows.shape == (2, tiny.config.vocab_size)
    assert rows.dtype is torch.float32
    assert torch.equal(rows[0], alone(tiny, one, [])[0])
    assert torch.equal(rows[1], alone(tiny, three, [])[0])


def test_logits_of_several_positions_are_those_of_one_at_a_time(tiny: Decoder) -> None:
    """What draft tokens are verified by."""
    prompt, drafts = tokens_of(tiny, 20, 1), tokens_of(tiny, 3, 2)
    expected = alone(tiny, prompt, drafts)
    driver = Driver(tiny)
    driver.step(driver.part("a", prompt, 0, 19))
    rows = driver.step(dataclasses.replace(driver.part("a", prompt + drafts, 19, 23), num_logits=4))
    assert all(torch.equal(row, wanted) for row, wanted in zip(rows, expected, strict=True))


def test_a_cache_of_another_layout_is_refused(tiny: Decoder) -> None:
    layout = kv_layout(dataclasses.replace(tiny.config, num_layers=3), BLOCK_SIZE, "float32")
    with pytest.raises(ValueError, match="laid out"):
        ModelRunner(tiny, KvCacheStorage(layout, 4))


def test_everything_lies_on_the_backends_device(folders: dict[int, Path]) -> None:
    """An operation on tensors of two devices raises, and "meta" is another one than the CPU."""
    backend = ReferenceBackend(FLOAT32, torch.device("meta"))
    model = load_model(ModelSource("hf", folders[64], "meta"), backend=backend)
    storage = KvCacheStorage(kv_layout(model.config, BLOCK_SIZE, "float32"), 4, backend.device)
    part = ScheduledSequence(request_id="a", token_ids=[5, 6, 7], start=0, block_ids=(1,), num_logits=2)
    runner = ModelRunner(model, storage)
    assert runner.forward(Batch((part,))).device == backend.device
    assert runner.forward(Batch(())).device == backend.device
