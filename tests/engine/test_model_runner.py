"""A sequence's logits depend on its own tokens only: bit for bit, whatever shares the step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.model_source import ModelSource, resolve_model
from engine.batch import Batch, ScheduledSequence
from engine.kv_cache_storage import KvCacheStorage
from engine.model_runner import ModelRunner, kv_layout
from engine.models.load import LoadedModel, load_model
from engine.ops.cpu import CpuBackend
from engine.ops.dtypes import resolve_dtype
from tests.engine.models.tiny_models import reference_model, save

BLOCK_SIZE = 16
NUM_BLOCKS = 80


@pytest.fixture(scope="module")
def bundled() -> Iterator[LoadedModel]:
    """The bundled model in the dtype that ``auto`` means here."""
    dtype = resolve_dtype("auto")
    return load_model(resolve_model("smollm2-135m-instruct"), dtype=dtype, backend=CpuBackend(dtype))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save(reference_model("qwen3"), Path(tmp_path_factory.mktemp("qwen3")))
    return load_model(
        ModelSource("hf", folder, "tiny"), dtype=torch.float32, backend=CpuBackend(torch.float32)
    )


class Driver:
    """Runs sequences through a fresh KV cache with block tables in random order."""

    def __init__(self, model: LoadedModel, seed: int = 0) -> None:
        layout = kv_layout(model.config, BLOCK_SIZE, model.module.backend.dtype)
        storage = KvCacheStorage(layout, NUM_BLOCKS)
        # What was never computed must not matter, whatever it holds.
        storage.tensor.fill_(float("nan"))
        self.runner = ModelRunner(model.module, storage)
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
            needs_logits=True,
        )

    def step(self, *parts: ScheduledSequence) -> torch.Tensor:
        return self.runner.forward(Batch(parts))


def tokens_of(model: LoadedModel, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(model.config.vocab_size), k=length)


def alone(model: LoadedModel, prompt: list[int], decoded: list[int]) -> list[torch.Tensor]:
    """Logits of a prompt in one chunk and then of single tokens."""
    driver, tokens = Driver(model), prompt + decoded
    rows = [driver.step(driver.part("a", tokens, 0, len(prompt)))[0]]
    for position in range(len(prompt), len(tokens)):
        rows.append(driver.step(driver.part("a", tokens, position, position + 1))[0])
    return rows


def check_in_company(model: LoadedModel, seed: int) -> None:
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


@pytest.mark.parametrize("seed", range(8))
def test_company_and_chunks_change_no_bit_of_a_tiny_model(tiny: LoadedModel, seed: int) -> None:
    check_in_company(tiny, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_company_and_chunks_change_no_bit_of_the_bundled_model(bundled: LoadedModel, seed: int) -> None:
    check_in_company(bundled, seed)


def check_recomputed(model: LoadedModel) -> None:
    tokens = tokens_of(model, 46, 3)
    decoded = alone(model, tokens[:40], tokens[40:])[-1]
    assert torch.equal(decoded, alone(model, tokens, [])[-1])


def test_decoding_gives_the_same_bits_as_recomputing_after_preemption(tiny: LoadedModel) -> None:
    check_recomputed(tiny)


@pytest.mark.slow
def test_decoding_the_bundled_model_in_float32_gives_the_same_bits_as_recomputing() -> None:
    source = resolve_model("smollm2-135m-instruct")
    check_recomputed(load_model(source, dtype=torch.float32, backend=CpuBackend(torch.float32)))


def test_only_asked_rows_come_back_in_order(tiny: LoadedModel) -> None:
    driver = Driver(tiny)
    one, two, three = (tokens_of(tiny, 9, seed) for seed in (1, 2, 3))
    parts = [driver.part(name, tokens, 0, 9) for name, tokens in (("1", one), ("2", two), ("3", three))]
    middle = ScheduledSequence(
        request_id="2", token_ids=two, start=0, block_ids=parts[1].block_ids, needs_logits=False
    )
    rows = driver.step(parts[0], middle, parts[2])
    assert rows.shape == (2, tiny.config.vocab_size)
    assert rows.dtype is torch.float32
    assert torch.equal(rows[0], alone(tiny, one, [])[0])
    assert torch.equal(rows[1], alone(tiny, three, [])[0])


def test_a_cache_of_another_layout_is_refused(tiny: LoadedModel) -> None:
    layout = kv_layout(tiny.config, BLOCK_SIZE, torch.bfloat16)
    with pytest.raises(ValueError, match="laid out"):
        ModelRunner(tiny.module, KvCacheStorage(layout, 4))
