"""Rows looked up in a quantised table are the rows of the dequantised table, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.weights.dequantize import dequantize
from engine.weights.quantized_rows import QuantizedRows
from tests.engine.stored import SIZES, stored_as
from tests.engine.weights.test_dequantize import REFERENCES, random_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("type_name", REFERENCES)
def test_rows_are_those_of_the_whole_table(type_name: str, dtype: torch.dtype) -> None:
    shape = (11, 3 * SIZES[type_name][0])
    table = stored_as(type_name, shape, random_blocks(type_name, 33, seed=8))
    indices = torch.tensor([10, 0, 3, 3, 7])
    rows = QuantizedRows(table, dtype).rows(indices)
    assert rows.dtype is torch.float32
    assert torch.equal(rows, dequantize([table], dtype)[indices].float())
