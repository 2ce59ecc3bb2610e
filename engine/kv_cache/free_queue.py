"""Blocks, and the queue of free ones that doubles as the least-recently-used list of cached ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.block_hash import BlockHash


class Block:
    """One block of the pool. Its links are set while, and only while, it is in the free queue."""

    __slots__ = ("block_hash", "block_id", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None  # set while the block is in the prefix cache
        self.previous_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        cached = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_count={self.ref_count}, block_hash={cached})"


class FreeBlockQueue:
    """An intrusive doubly linked list: every operation is O(1), removal from the middle included.

    Two sentinels stand before the head and behind the tail, so that no link of a member is ever None.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._front = Block(-1)
        self._back = Block(-1)
        self._front.next_free = self._back
        self._back.previous_free = self._front
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: Block) -> bool:
        return block.next_free is not None

    def __iter__(self) -> Iterator[Block]:
        block = self._front.next_free
        while block is not None and block is not self._back:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Puts ``block`` at the tail: it is reused last."""
        assert self._back.previous_free is not None
        self._link(self._back.previous_free, block, self._back)

    def prepend(self, block: Block) -> None:
        """Puts ``block`` at the head: it is reused first."""
        assert self._front.next_free is not None
        self._link(self._front, block, self._front.next_free)

    def pop(self) -> Block:
        """Takes the block at the head. Raises IndexError if the queue is empty."""
        block = self._front.next_free
        assert block is not None
        if block is self._back:
            raise IndexError("the free block queue is empty")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes ``block`` out, wherever it is. Raises ValueError if it is not in the queue."""
        before, after = block.previous_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free block queue")
        before.next_free = after
        after.previous_free = before
        block.previous_free = block.next_free = None
        self._length -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        if block.next_free is not None:
            raise ValueError(f"{block} is already in the free block queue")
        before.next_free = block
        block.previous_free = before
        block.next_free = after
        after.previous_free = block
        self._length += 1
