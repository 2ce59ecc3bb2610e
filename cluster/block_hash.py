"""Hash chains over full blocks of token ids: the name of a KV block in every process.

The chain's root is seeded from the model's fingerprint and the KV layout, so that two workers give the same
name to a block only if its bytes are interchangeable. Python's ``hash`` differs between processes and is
never used.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

BlockHash = bytes  # 32 bytes of sha256


def root_hash(model_fingerprint: str, layout_fingerprint: str, salt: str = "") -> BlockHash:
    """The parent of a prompt's first block. ``salt`` separates tenants or adapters that may not share."""
    text = "\x1f".join(("leadout-kv-1", model_fingerprint, layout_fingerprint, salt))
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
