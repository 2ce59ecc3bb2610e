"""What a KV layout says about a rank's cache, and which layouts are refused."""

from __future__ import annotations

import msgspec
import pytest

from cluster.kv_layout import KvLayout, why_not_convertible

LAYOUT = KvLayout(num_layers=30, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
LATENT = KvLayout(num_layers=61, num_kv_heads=1, head_dim=576, block_size=64, dtype="bfloat16", num_planes=1)


def changed(layout: KvLayout, **change: object) -> KvLayout:
    return msgspec.structs.replace(layout, **change)


def test_one_rank_holds_everything() -> None:
    assert LAYOUT.heads_per_rank == 8
    assert LAYOUT.block_shape == (30, 2, 8, 16, 64)
    assert LAYOUT.row_bytes == 128
    assert LAYOUT.block_bytes == 30 * 2 * 8 * 16 * 64 * 2


def test_ranks_take_consecutive_heads() -> None:
    layout = changed(LAYOUT, tp_size=4)
    assert layout.num_kv_heads == 8
    assert [list(layout.heads_of_rank(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.num_head_replicas == 1
    assert layout.block_shape == (30, 2, 2, 16, 64)
    assert layout.block_bytes * 4 == LAYOUT.block_bytes


def test_consecutive_ranks_share_a_head_where_there_are_too_few() -> None:
    layout = changed(LAYOUT, num_kv_heads=2, tp_size=8)
    assert [list(layout.heads_of_rank(rank)) for rank in range(8)] == [[0]] * 4 + [[1]] * 4
    assert layout.num_head_replicas == 4
    assert layout.block_shape == (30, 2, 1, 16, 64)


def test_every_rank_holds_the_whole_latent() -> None:
    layout = changed(LATENT, tp_size=4)
    assert [list(layout.heads_of_rank(rank)) for rank in range(4)] == [[0]] * 4
    assert layout.block_shape == LATENT.block_shape == (61, 1, 1, 64, 576)
    assert layout.block_bytes == LATENT.block_bytes == 61 * 64 * 576 * 2


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}, must be 0 to 3"):
        changed(LAYOUT, tp_size=4).heads_of_rank(rank)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, must be at least 1"),
        ({"num_kv_heads": -8}, "num_kv_heads is -8, must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0, must be at least 1"),
        ({"block_size": 0}, "block_size is 0, must be at least 1"),
        ({"tp_size": 0}, "tp_size is 0, must be at least 1"),
        ({"dtype": "int7"}, "dtype is 'int7', must be one of float32, bfloat16, float16"),
        ({"num_planes": 3}, "num_planes is 3, must be 1 or 2"),
        ({"tp_size": 3}, "tp_size is 3, must divide num_kv_heads 8 or be a multiple of it"),
        ({"tp_size": 12}, "tp_size is 12, must divide num_kv_heads 8 or be a multiple of it"),
    ],
)
def test_impossible_layouts_are_refused(change: dict[str, object], message: str) -> None:
    fields = msgspec.structs.asdict(LAYOUT) | change
    with pytest.raises(ValueError, match=message):
        KvLayout(**fields)
    with pytest.raises(msgspec.ValidationError, match=message):  # from a peer as well
        msgspec.convert(fields, KvLayout)


def test_where_values_lie_may_differ_but_not_what_they_are() -> None:
    assert why_not_convertible(LAYOUT, LAYOUT) is None
    assert why_not_convertible(LAYOUT, changed(LAYOUT, block_size=64, tp_size=4)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_layers": 28}, "num_layers differs: the source has 30, the target 28"),
        ({"num_planes": 1}, "num_planes differs: the source has 2, the target 1"),
        ({"num_kv_heads": 4}, "num_kv_heads differs: the source has 8, the target 4"),
        ({"head_dim": 128}, "head_dim differs: the source has 64, the target 128"),
        ({"dtype": "float16"}, "dtype differs: the source has bfloat16, the target float16"),
    ],
)
def test_the_first_difference_is_named_with_both_values(change: dict[str, object], reason: str) -> None:
    assert why_not_convertible(LAYOUT, changed(LAYOUT, **change)) == reason
