"""Which blocks are checked, and that their checksums are those of their bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cluster.sequence_spec import RequestKey
from kv_transfer.verification import SAMPLED_SHARE, BlockVerifier, VerifyMode

BLOCK_BYTES = 64
NUM_BLOCKS = 8


class Cache:
    """A KV cache in host memory with its verifier."""

    def __init__(self, mode: VerifyMode = "all") -> None:
        self.memory = ctypes.create_string_buffer(NUM_BLOCKS * BLOCK_BYTES)
        self.verifier = BlockVerifier(
            mode, base_address=ctypes.addressof(self.memory), block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS
        )

    def write(self, block_id: int, data: bytes) -> None:
        ctypes.memmove(ctypes.addressof(self.memory) + block_id * BLOCK_BYTES, data, BLOCK_BYTES)

    def checksums(self, *block_ids: int) -> list[int]:
        return self.verifier.checksums(block_ids).result(timeout=20)


@pytest.fixture(scope="module")
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.verifier.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Cache]:
    """The other worker's."""
    other = Cache()
    yield other
    other.verifier.close()


# --- which blocks ----------------------------------------------------------------------------------------


def verifier(mode: VerifyMode) -> BlockVerifier:
    return BlockVerifier(mode, base_address=1, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 100])
def test_off_is_none_and_all_is_all(num_blocks: int) -> None:
    assert verifier("off").choose(RequestKey("r", 0), num_blocks) == []
    assert verifier("all").choose(RequestKey("r", 0), num_blocks) == list(range(num_blocks))


@given(request_id=st.text(max_size=20), attempt=st.integers(0, 2**31), num_blocks=st.integers(1, 200))
def test_a_sample_is_the_same_for_everybody_and_has_the_last_block(
    request_id: str, attempt: int, num_blocks: int
) -> None:
    sample = verifier("sampled").choose(RequestKey(request_id, attempt), num_blocks)
    assert sample == verifier("sampled").choose(RequestKey(request_id, attempt), num_blocks)
    assert sample[-1] == num_blocks - 1
    assert sample == sorted(set(sample))
    assert sample[0] >= 0


@given(request_id=st.text(max_size=20), num_blocks=st.integers(2, 200), fewer=st.integers(1, 199))
def test_whether_a_block_is_checked_does_not_depend_on_how_many_follow(
    request_id: str, num_blocks: int, fewer: int
) -> None:
    fewer = min(fewer, num_blocks - 1)
    long = verifier("sampled").choose(RequestKey(request_id, 0), num_blocks)
    short = verifier("sampled").choose(RequestKey(request_id, 0), fewer)
    assert short == sorted({index for index in long if index < fewer} | {fewer - 1})


def test_a_sample_is_one_block_in_sixteen() -> None:
    """Of a million, over many requests and within one: within 5 %, which is far more than chance allows."""
    one = verifier("sampled")
    over_requests = sum(
        len(one.choose(RequestKey(f"request-{number}", 0), 101)) - 1 for number in range(2_000)
    )
    within_one = len(one.choose(RequestKey("r", 0), 200_001)) - 1
    for count in (over_requests, within_one):
        assert abs(count / 200_000 - 1 / SAMPLED_SHARE) < 0.05 / SAMPLED_SHARE


def test_another_attempt_is_another_sample() -> None:
    one = verifier("sampled")
    samples = {
        tuple(one.choose(RequestKey(request_id, attempt), 500)) for request_id in "ab" for attempt in range(5)
    }
    assert len(samples) == 10


def test_an_empty_handoff_has_nothing_to_check() -> None:
    assert verifier("sampled").choose(RequestKey("r", 0), 0) == []


# --- checksums -------------------------------------------------------------------------------------------


blocks = st.binary(min_size=BLOCK_BYTES, max_size=BLOCK_BYTES)


@given(data=blocks, here=st.integers(0, NUM_BLOCKS - 1), there=st.integers(0, NUM_BLOCKS - 1))
def test_equal_bytes_have_equal_checksums_wherever_they_lie(
    cache: Cache, other: Cache, data: bytes, here: int, there: int
) -> None:
    cache.write(here, data)
    other.write(there, data)
    assert cache.checksums(here) == other.checksums(there) == [xxhash.xxh3_64_intdigest(data)]


@given(data=blocks, bit=st.integers(0, 8 * BLOCK_BYTES - 1))
def test_one_wrong_bit_shows(cache: Cache, other: Cache, data: bytes, bit: int) -> None:
    wrong = bytearray(data)
    wrong[bit // 8] ^= 1 << bit % 8
    cache.write(3, data)
    other.write(3, bytes(wrong))
    assert cache.checksums(3) != other.checksums(3)


def test_every_bit_of_a_block_counts_and_no_other(cache: Cache) -> None:
    data = bytes(range(BLOCK_BYTES))
    for block_id in range(NUM_BLOCKS):
        cache.write(block_id, data)
    (right,) = cache.checksums(4)
    seen = {right}
    for bit in range(8 * BLOCK_BYTES):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        cache.write(4, bytes(wrong))
        seen.update(cache.checksums(4))
        assert cache.checksums(3, 5) == [right, right], "its neighbours are as they were"
    assert len(seen) == 1 + 8 * BLOCK_BYTES


def test_checksums_come_in_the_order_asked_for(cache: Cache) -> None:
    expected = []
    for block_id in range(NUM_BLOCKS):
        data = bytes([block_id + 1]) * BLOCK_BYTES
        cache.write(block_id, data)
        expected.append(xxhash.xxh3_64_intdigest(data))
    assert cache.checksums(5, 0, 7, 5) == [expected[5], expected[0], expected[7], expected[5]]
    assert cache.checksums() == []


# --- bad arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS, 2**40])
def test_a_block_that_the_cache_has_not_is_refused(cache: Cache, block_id: int) -> None:
    with pytest.raises(
        ValueError, match=f"^block id {block_id} is out of range: there are {NUM_BLOCKS} blocks$"
    ):
        cache.verifier.checksums([0, block_id])


@pytest.mark.parametrize("mode", ["on", "OFF", "", "none"])
def test_a_mode_that_is_none_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"^verify is '{mode}', must be off, sampled or all$"):
        verifier(mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["sampled", "all"])
def test_memory_that_the_cpu_cannot_read_is_refused(mode: VerifyMode) -> None:
    with pytest.raises(ValueError, match=f"^verify is {mode}, but the KV cache is in VRAM: only host memory"):
        BlockVerifier(mode, base_address=1, block_bytes=64, num_blocks=2, memory="VRAM")


def test_without_verification_any_memory_will_do() -> None:
    one = BlockVerifier("off", base_address=1, block_bytes=64, num_blocks=2, memory="VRAM")
    assert one.choose(RequestKey("r", 0), 100) == []
    one.close()


def test_close_finishes_what_was_asked_for() -> None:
    cache = Cache()
    asked = [cache.verifier.checksums(range(NUM_BLOCKS)) for _ in range(50)]
    cache.verifier.close()
    assert all(future.result(timeout=0) == asked[0].result() for future in asked)
    with pytest.raises(RuntimeError):
        cache.verifier.checksums([0])
