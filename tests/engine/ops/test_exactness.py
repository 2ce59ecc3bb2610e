"""A row's result has the same bits alone and in any company: each operation, in each format, on each path.

Everything here also runs under a lower instruction set than the processor's, and with several threads.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cluster.kv_layout import KvLayout
from engine.kv_cache_storage import KvCacheStorage
from engine.ops.backend import Backend, SequenceSpan
from engine.ops.cpu import CpuBackend
from engine.ops.cpu_linear import EmulatedBfloat16Linear, LinearKernel, RowByRowLinear, linear_kernel
from engine.ops.number_formats import BFLOAT16, FLOAT32, NumberFormat, number_formats
from engine.ops.reference import ReferenceBackend
from tests.engine.formats import FORMATS, name_of
from tests.engine.stored import stored

IS_LOWERED = "LEADOUT_TEST_LOWERED" in os.environ  # runs for test_the_same_on_a_processor_with_less
MANY_ROWS = [] if IS_LOWERED else [119, 128, 129, 255, 257]
NUM_ROWS = [*range(1, 20), 31, 32, 33, 37, 38, 64, 65, 127, *MANY_ROWS]
MOST_ROWS = 300
WIDTHS = [1, 7, 31, 32, 33, 40, 63, 96, 100, 257, 576, 1000, 1537]
HEAD_DIMS = [16, 48, 64, 72, 80, 96, 112, 128, 192, 256]


@pytest.fixture(params=[1] if IS_LOWERED else [1, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads share out rows or columns, and each has a remainder of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inexact(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> list[int]:
    """The numbers of rows whose results differ from the same rows' among all of ``rows``."""
    expected = function(rows)
    return [
        count
        for count in NUM_ROWS
        if not torch.equal(function(rows[7 : 7 + count].clone()), expected[7 : 7 + count])
    ]


def kernels() -> list[LinearKernel]:
    """Those that this machine chooses, and those that others fall back to."""
    row_by_row = RowByRowLinear()
    chosen = [linear_kernel(number_format) for number_format in FORMATS]
    emulated = EmulatedBfloat16Linear(linear_kernel(FLOAT32))
    return [*chosen, emulated, row_by_row, EmulatedBfloat16Linear(row_by_row)]


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 192), (1536, 576), (577, 131)])
@pytest.mark.parametrize("index", range(len(kernels())))
def test_linear(index: int, in_features: int, out_features: int, num_threads: int) -> None:
    kernel = kernels()[index]
    torch.manual_seed(index)
    weight = torch.randn(out_features, in_features) * 0.05
    packed = kernel.pack(weight, torch.randn(out_features))
    rows = torch.randn(MOST_ROWS, in_features) * torch.rand(MOST_ROWS, 1) * 3
    assert inexact(lambda x: kernel.multiply(x, packed), rows) == [], kernel.name


@pytest.mark.parametrize("width", WIDTHS)
def test_element_wise_operations(width: int, num_threads: int) -> None:
    torch.manual_seed(width)
    backend = CpuBackend(FLOAT32)
    gate_up, x, weight = (
        torch.randn(MOST_ROWS, 2 * width) * 4,
        torch.randn(MOST_ROWS, width),
        torch.rand(width),
    )
    assert inexact(backend.silu_mul, gate_up) == []
    assert inexact(lambda rows: backend.rms_norm(rows, weight, 1e-5), x) == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotary(head_dim: int, num_threads: int) -> None:
    torch.manual_seed(head_dim)
    packed = torch.randn(MOST_ROWS, 5, head_dim)  # heads 0 to 2 are rotated by the cos and sin in 3 and 4
    backend = CpuBackend(FLOAT32)
    assert inexact(lambda rows: backend.rotary(rows[:, :3], rows[:, 3:4], rows[:, 4:5]), packed) == []


@pytest.mark.parametrize("num_queries_per_kv", [1, 3, 5, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention(dtype: str, head_dim: int, num_queries_per_kv: int) -> None:
    """One sequence in one chunk, in several, and token by token beside another."""
    torch.manual_seed(head_dim)
    block_size, length, num_kv_heads = 16, 75, 2
    num_heads = num_kv_heads * num_queries_per_kv
    layout = KvLayout(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    query = torch.randn(length, num_heads, head_dim)
    key, value = torch.randn(2, length, num_kv_heads, head_dim)
    backend = CpuBackend(FLOAT32)

    def attend(cuts: list[int], *, in_company: bool = False) -> torch.Tensor:
        storage = KvCacheStorage(layout, 12)
        storage.tensor.fill_(float("nan"))
        rows = []
        for start, end in itertools.pairwise(cuts):
            spans = [SequenceSpan(0, end - start, start, [3, 1, 4, 2, 5])]
            parts = [slice(start, end)]
            if in_company:  # another sequence with the same tokens, as far
                spans.append(SequenceSpan(end - start, end - start, start, [6, 7, 8, 9, 10]))
                parts.append(slice(start, end))
            attention = backend.plan_attention(spans, storage)
            attention.write_kv(0, *(torch.cat([part[cut] for cut in parts]) for part in (key, value)))
            out = attention.attend(0, torch.cat([query[cut] for cut in parts]), head_dim**-0.5)
            rows.append(out[: end - start])
        return torch.cat(rows)

    whole = attend([0, length])
    assert torch.equal(attend([0, 1, 4, 31, 32, 33, 70, length]), whole), "chunks"
    assert torch.equal(attend([*range(length), length]), whole), "decoded"
    assert torch.equal(attend([0, 40, *range(41, length), length], in_company=True), whole), "in company"


@pytest.mark.parametrize("backend", [CpuBackend(FLOAT32), ReferenceBackend(FLOAT32)])
def test_values_beyond_the_range_of_a_float16_cache_stay_finite(backend: Backend) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype="float16")
    storage = KvCacheStorage(layout, 2)
    attention = backend.plan_attention([SequenceSpan(0, 2, 0, [1])], storage)
    huge = torch.full((2, 1, 16), 1e6)
    attention.write_kv(0, huge, -huge)
    assert torch.equal(attention.attend(0, torch.ones(2, 1, 16), 1e-9), torch.full((2, 1, 16), -65504.0))


def test_bfloat16_by_float32_kernels_is_what_a_bfloat16_kernel_computes() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 48), torch.randn(96), torch.randn(7, 48)
    emulated = EmulatedBfloat16Linear(linear_kernel(FLOAT32))
    ours = emulated.multiply(x, emulated.pack(weight.clone(), bias))
    exact = x.bfloat16().double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, atol=2e-2, rtol=2**-8)
    assert (ours == exact.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("number_format", FORMATS, ids=name_of)
def test_logits_are_not_rounded(number_format: NumberFormat) -> None:
    torch.manual_seed(1)
    backend = CpuBackend(number_format)
    head, hidden = torch.randn(40, 64).to(number_format.weights), torch.randn(3, 64)
    logits = backend.logits(hidden, backend.prepack_head(stored(head)))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, hidden @ head.float().T, atol=1e-4, rtol=1e-5)
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.slow
@pytest.mark.skipif(IS_LOWERED, reason="runs inside of itself")
@pytest.mark.parametrize(("onednn", "aten"), [("SSE41", "default"), ("AVX2", "avx2")])
def test_the_same_on_a_processor_with_less(onednn: str, aten: str) -> None:
    if torch.backends.cpu.get_cpu_capability() == aten.upper():
        pytest.skip(f"this processor has no more than {aten}: the other tests say the same")
    lowered = {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten, "LEADOUT_TEST_LOWERED": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, **lowered},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]


def test_bfloat16_is_never_chosen_by_itself() -> None:
    for has_float16 in (True, False):
        assert BFLOAT16 not in number_formats("auto", has_float16=has_float16)
