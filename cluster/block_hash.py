"""Hash chains over full blocks of token ids: the name of a KV block in every process.

A hash says which tokens of which model a block holds, not how its bytes lie: workers with other TP sizes or
dtypes give it the same name. Who copies blocks between caches compares their layouts
(``cluster.kv_layout.why_not_convertible``). Python's ``hash`` differs between processes and is never used.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

BlockHash = bytes  # 32 bytes of sha256


def root_hash(model_fingerprint: str, block_size: int, salt: str = "") -> BlockHash:
    """The parent of a prompt's first block. ``block_size`` is in tokens.

    ``salt`` separates tenants or adapters that may not share.
    """
    text = "\x1f".join(("leadout-kv-2", model_fingerprint, str(block_size), salt))
    return hashlib.sha256(text.encode()).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block given its predecessor's hash. Token ids are hashed as little-endian u32."""
    return hashlib.sha256(parent + _token_bytes(token_ids)).digest()


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    parent: BlockHash,
    *,
    start_block: int = 0,
) -> list[BlockHash]:
    """Hashes of the full blocks of ``token_ids`` from ``start_block`` on; ``parent`` precedes that block."""
    hashes: list[BlockHash] = []
    for block in range(start_block, len(token_ids) // block_size):
        parent = hash_block(parent, token_ids[block * block_size : (block + 1) * block_size])
        hashes.append(parent)
    return hashes


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if words.itemsize != 4:  # pragma: no cover - no supported platform
        raise RuntimeError("array('I') is not 4 bytes wide here")
    if sys.byteorder == "big":  # pragma: no cover
        words.byteswap()
    return words.tobytes()
