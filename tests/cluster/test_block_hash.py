"""Block hashes: equal in every process, different for any difference before or in a block."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from cluster.block_hash import hash_blocks, root_hash

ROOT = root_hash("fingerprint", 4)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(tokens)
def test_only_full_blocks_are_hashed_and_a_chain_can_be_continued(ids: list[int]) -> None:
    hashes = hash_blocks(ids, 4, ROOT)
    assert len(hashes) == len(ids) // 4
    for split in range(len(hashes) + 1):
        parent = hashes[split - 1] if split else ROOT
        assert hash_blocks(ids, 4, parent, start_block=split) == hashes[split:]


@given(tokens, tokens)
def test_equal_hashes_mean_equal_prefixes(one: list[int], other: list[int]) -> None:
    for index, (mine, theirs) in enumerate(
        zip(hash_blocks(one, 4, ROOT), hash_blocks(other, 4, ROOT), strict=False)
    ):
        end = (index + 1) * 4
        assert (mine == theirs) == (one[:end] == other[:end])


def test_model_block_size_and_salt_are_in_every_hash() -> None:
    roots = {
        root_hash("fingerprint", 4),
        root_hash("fingerprint", 4, "salt"),
        root_hash("fingerprint", 16),
        root_hash("other", 4),
    }
    assert len({hash_blocks([1, 2, 3, 4], 4, root)[0] for root in roots}) == 4


def test_another_process_computes_the_same() -> None:
    code = (
        "from cluster.block_hash import hash_blocks, root_hash;"
        "print(hash_blocks(list(range(32)), 16, root_hash('f', 16, 's'))[-1].hex())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == hash_blocks(list(range(32)), 16, root_hash("f", 16, "s"))[-1].hex()
