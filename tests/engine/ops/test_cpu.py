"""The CPU backend against the plain definitions of its operations."""

from __future__ import annotations

import random

import pytest
import torch

from cluster.kv_layout import KvLayout
from engine.kv_cache_storage import KvCacheStorage
from engine.ops.backend import SequenceSpan, StepContext
from engine.ops.cpu import CpuBackend
from engine.ops.number_formats import FLOAT32, NumberFormat, resolve_kv_cache_dtype
from engine.ops.reference import ReferenceBackend
from tests.engine.formats import FORMATS, name_of
from tests.engine.stored import stored

BLOCK_SIZE = 16
NUM_BLOCKS = 64


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-2 if expected.dtype is torch.bfloat16 else 2e-4
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("number_format", FORMATS, ids=name_of)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_and_logits(number_format: NumberFormat, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    weight, x = (torch.randn(96, 48) * 0.1).to(number_format.weights), torch.randn(num_rows, 48)
    bias = torch.randn(96) if has_bias else None
    ours, reference = CpuBackend(number_format), ReferenceBackend(number_format)
    weights = [stored(weight[:32]), stored(weight[32:])]  # two layers as one
    biases = [] if bias is None else [stored(bias[:32]), stored(bias[32:])]
    packed, plain = ours.prepack_linear(weights, biases), reference.prepack_linear(weights, biases)
    close(ours.linear(x, packed), reference.linear(x, plain))
    head, plain_head = ours.prepack_head(stored(weight)), reference.prepack_head(stored(weight))
    close(ours.logits(x, head), reference.logits(x, plain_head))


def test_element_wise_operations() -> None:
    torch.manual_seed(0)
    ours, reference = CpuBackend(FLOAT32), ReferenceBackend(FLOAT32)
    x, weight, gate_up = torch.randn(7, 48), torch.randn(48), torch.randn(7, 160) * 4
    close(ours.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    close(ours.silu_mul(gate_up), reference.silu_mul(gate_up))
    heads, cos, sin = torch.randn(7, 3, 16), torch.randn(7, 1, 16), torch.randn(7, 1, 16)
    close(ours.rotary(heads, cos, sin), reference.rotary(heads, cos, sin))
    table, token_ids = torch.randn(20, 48), torch.tensor([0, 19, 3, 3])
    rows, plain_rows = ours.embedding_table(stored(table)), reference.embedding_table(stored(table))
    assert torch.equal(ours.embedding(token_ids, rows), reference.embedding(token_ids, plain_rows))


@pytest.mark.parametrize("number_format", FORMATS, ids=name_of)
def test_coarse_operations(number_format: NumberFormat) -> None:
    """Each is what its parts are, whether a backend composes it of them or not."""
    torch.manual_seed(2)
    num_heads, num_kv_heads, head_dim, dtype = 6, 2, 16, number_format.weights
    layout = KvLayout(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        dtype=resolve_kv_cache_dtype("auto", number_format),
    )
    weights = [stored((torch.randn(heads * head_dim, 48) * 0.1).to(dtype)) for heads in (6, 2, 2)]
    spans = [SequenceSpan(0, 20, 0, [3, 1]), SequenceSpan(20, 1, 0, [2])]
    x, norm = torch.randn(21, 48), torch.rand(48)
    cos, sin = torch.randn(2, 21, 1, head_dim)
    results = []
    for backend in (CpuBackend(number_format), ReferenceBackend(number_format)):
        query_key, value = backend.qkv(x, backend.prepack_linear(weights), num_heads, num_kv_heads)
        assert query_key.shape == (21, num_heads + num_kv_heads, head_dim)
        assert value.shape == (21, num_kv_heads, head_dim)
        assert query_key.dtype is value.dtype is number_format.activations
        storage = KvCacheStorage(layout, 4)
        context = StepContext(cos, sin, backend.plan_attention(spans, storage))
        attended = backend.rotary_write_attend(1, query_key, value, 0.25, context)
        residual = x.clone()
        normed = backend.add_rms_norm(residual, attended.view(21, -1)[:, :48], norm, 1e-5)
        results.append((query_key, value, storage.tensor, attended, residual, normed))
        assert not storage.tensor[:, 0].any(), "another layer was written"
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=2e-2, rtol=2e-2)
    query_key, value, cache, attended, residual, normed = results[1]
    rotated = backend.rotary(query_key, cos, sin)
    assert torch.equal(cache[2, 1, 0, :, 0], rotated[20, num_heads:].to(cache.dtype))
    assert torch.equal(cache[2, 1, 1, :, 0], value[20].to(cache.dtype))
    assert torch.equal(residual, x + attended.view(21, -1)[:, :48])
    assert torch.equal(normed, backend.rms_norm(residual, norm, 1e-5))


def spans_of(rng: random.Random) -> tuple[list[SequenceSpan], list[int]]:
    """Prefill chunks and decode tokens of several sequences, with block tables in random order."""
    free = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    spans, start = [], 0
    for _ in range(rng.randrange(1, 6)):
        context_len = rng.choice((0, 1, 15, 16, 31, 32, 33, 70, 100))
        query_len = rng.choice((1, 1, 2, 17, 32, 45))
        blocks = [free.pop() for _ in range(-(-(context_len + query_len) // BLOCK_SIZE))]
        spans.append(SequenceSpan(start, query_len, context_len, blocks))
        start += query_len
    return spans, free


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (6, 1), (10, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_paged_attention(num_heads: int, num_kv_heads: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layout = KvLayout(
        num_layers=2, num_kv_heads=num_kv_heads, head_dim=16, block_size=BLOCK_SIZE, dtype="float32"
    )
    spans, free = spans_of(rng)
    num_tokens = sum(span.query_len for span in spans)
    query = torch.randn(num_tokens, num_heads, 16)
    key, value = torch.randn(num_tokens, num_kv_heads, 16), torch.randn(num_tokens, num_kv_heads, 16)
    context = torch.randn(NUM_BLOCKS, *layout.block_shape)
    results, caches = [], []
    for backend in (CpuBackend(FLOAT32), ReferenceBackend(FLOAT32)):
        storage = KvCacheStorage(layout, NUM_BLOCKS)
        storage.tensor.copy_(context)
        storage.tensor[free] = torch.nan  # other sequences' blocks must not be read
        attention = backend.plan_attention(spans, storage)
        attention.write_kv(1, key, value)
        results.append(attention.attend(1, query, 0.25))
        caches.append(storage.tensor.clone())
    close(results[0], results[1])
    used = [block for span in spans for block in span.block_ids]
    assert torch.equal(caches[0][used], caches[1][used])
    assert torch.equal(caches[0][:, 0].nan_to_num(7), caches[1][:, 0].nan_to_num(7)), (
        "another layer was written"
    )
