"""Block hashes of one prompt, per group of workers with the same model and block size."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.block_hash import BlockHash, hash_blocks, root_hash
from cluster.members import WorkerRecord

HashGroup = tuple[str, int]  # model fingerprint, block size


def hash_group(record: WorkerRecord) -> HashGroup:
    """Workers of one group give the same name to the same block."""
    return record.model.fingerprint, record.kv_layout.block_size


class PromptHashes:
    """Hashes a prompt at most once for each group."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._hashes: dict[HashGroup, list[BlockHash]] = {}

    def of(self, group: HashGroup) -> list[BlockHash]:
        """Hashes of the prompt's full blocks for ``group``."""
        hashes = self._hashes.get(group)
        if hashes is None:
            model_fingerprint, block_size = group
            root = root_hash(model_fingerprint, block_size, self._cache_salt)
            hashes = hash_blocks(self._token_ids, block_size, root)
            self._hashes[group] = hashes
        return hashes
