"""Rows looked up in a quantised table are the rows of the dequantised table, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.weights.dequantize import dequantize
from engine.weights.quantized_rows import QuantizedRows
from tests.engine.weights.test_dequantize import REFERENCES, SIZES, random_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("type_name", REFERENCES)
def test_rows_are_those_of_the_whole_table(type_name: str, dtype: torch.dtype) -> None:
    shape = (11, 3 * SIZES[type_name][0])
    data = random_blocks(type_name, 33, seed=8)
    indices = torch.tensor([10, 0, 3, 3, 7])
    rows = QuantizedRows(data, type_name, shape, dtype).rows(indices)
    assert rows.dtype is torch.float32
    assert torch.equal(rows, dequantize(data, type_name, shape, dtype)[indices].float())


def test_other_types_and_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="F16 is no quantised type"):
        QuantizedRows(bytes(8), "F16", (2, 2), torch.float32)
    with pytest.raises(ValueError, match="33 bytes"):
        QuantizedRows(bytes(33), "Q8_0", (1, 32), torch.float32)
