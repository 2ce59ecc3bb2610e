"""Which workers may hand over to each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.kv_layout import KvLayout
from cluster.members import TransportEndpoint, WorkerRecord, incompatibility
from tests.router.factories import LAYOUT, model_identity, worker_record

PREFILL, DECODE = worker_record("prefill-0", "prefill"), worker_record("decode-0", "decode")


def endpoint(**change: Any) -> TransportEndpoint:
    return msgspec.structs.replace(DECODE.endpoints[0], **change)


def test_equal_workers_are_compatible() -> None:
    assert incompatibility(PREFILL, DECODE) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"protocol_version": 99}, "protocol version"),
        ({"model": model_identity(fingerprint="other")}, "model fingerprint"),
        ({"model": model_identity(dtype="bfloat16")}, "dtype"),
        ({"endpoints": (endpoint(kind="other"),)}, "transport"),
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"endpoints": ()}, "decode-0 has 0 transport endpoints for 1 ranks"),
        ({"endpoints": DECODE.endpoints * 2}, "decode-0 has 2 transport endpoints for 1 ranks"),
        ({"endpoints": (endpoint(num_blocks=0),)}, "rank 0 of decode-0 has 0 KV blocks at address 1"),
        ({"endpoints": (endpoint(base_address=0),)}, "rank 0 of decode-0 has 8 KV blocks at address 0"),
        ({"endpoints": (endpoint(num_blocks=2**60),)}, f"has {2**60} KV blocks at address 1"),
        (
            {
                "kv_layout": msgspec.structs.replace(LAYOUT, num_kv_heads=2, tp_size=2),
                "endpoints": (endpoint(), endpoint(kind="other")),
            },
            "decode-0 has endpoints of several transports: nixl, other",
        ),
    ],
)
def test_endpoints_that_peers_cannot_use_are_refused(change: dict[str, Any], named: str) -> None:
    fields = {**msgspec.structs.asdict(DECODE), **change}
    with pytest.raises(ValueError, match=named):
        WorkerRecord(**fields)
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=WorkerRecord)


def test_records_survive_the_registry() -> None:
    data = msgspec.msgpack.encode(PREFILL)
    assert msgspec.msgpack.decode(data, type=WorkerRecord) == PREFILL


def test_a_block_is_as_large_as_its_shape() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    assert layout.block_shape == (30, 2, 3, 16, 64)
    assert layout.block_bytes == 360 * 1024
