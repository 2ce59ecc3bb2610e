"""Which workers may hand over to each other."""

from __future__ import annotations

import msgspec
import pytest

from cluster.kv_layout import KvLayout
from cluster.members import WorkerRecord, incompatibility
from tests.router.factories import model_identity, worker_record

PREFILL, DECODE = worker_record("prefill-0", "prefill"), worker_record("decode-0", "decode")


def test_equal_workers_are_compatible() -> None:
    assert incompatibility(PREFILL, DECODE) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"protocol_version": 99}, "protocol version"),
        ({"model": model_identity(fingerprint="other")}, "model fingerprint"),
        ({"model": model_identity(dtype="bfloat16")}, "dtype"),
        (
            {"kv_layout": KvLayout(num_layers=9, num_kv_heads=1, head_dim=8, block_size=32, dtype="float32")},
            "KV layout",
        ),
    ],
)
def test_the_first_difference_is_named_with_both_sides(change: dict[str, object], named: str) -> None:
    reason = incompatibility(PREFILL, msgspec.structs.replace(DECODE, **change))
    assert reason is not None
    assert reason.startswith(f"{named} differs: prefill-0 has ")
    assert "decode-0 has " in reason


def test_records_survive_the_registry() -> None:
    data = msgspec.msgpack.encode(PREFILL)
    assert msgspec.msgpack.decode(data, type=WorkerRecord) == PREFILL


def test_a_block_is_as_large_as_its_shape() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    assert layout.block_shape == (30, 2, 3, 16, 64)
    assert layout.block_bytes == 360 * 1024
