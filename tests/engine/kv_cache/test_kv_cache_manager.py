"""The prefix cache against a model that remembers everything: hits are right, and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.block_hash import hash_blocks, root_hash
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import SequenceSpec
from engine.kv_cache.block_pool import BlockPoolError
from engine.kv_cache.kv_cache_manager import KvCacheManager
from engine.new_request import NewRequest
from engine.sequence import Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 11


def ROOT(salt: str) -> bytes:  # noqa: N802 - a constant in all but form
    return root_hash("model", BLOCK_SIZE, salt)


def sequence(name: str, tokens: list[int], salt: str = "") -> Sequence:
    request = NewRequest(
        request_id=name,
        spec=SequenceSpec(
            prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=4, seed=0), cache_salt=salt
        ),
    )
    return Sequence(request, arrived_at=0.0, arrival_index=0, hash_root=ROOT(salt))


def admit(manager: KvCacheManager, one: Sequence, *, remote: bool = False) -> bool:
    cached = manager.find_cached_blocks(one)
    admitted = manager.allocate(one, one.num_tokens, cached_block_ids=cached, for_remote_writer=remote)
    if admitted:
        one.num_computed_tokens = len(cached) * BLOCK_SIZE
    return admitted


class CacheMachine(RuleBasedStateMachine):
    """Allocations of every kind; the content of each block is what a writer would have put there."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, ROOT, prefix_caching=True)
        self.live: dict[str, Sequence] = {}
        self.held: set[str] = set()
        self.quarantined: set[str] = set()
        self.content: dict[int, bytes] = {}  # block id → hash of what it holds
        self.count = 0
        self.cached: set[bytes] = set()

    @rule(
        length=st.integers(1, 22),
        branch=st.integers(0, 3),
        at=st.integers(0, 3),
        salt=st.sampled_from(["", "b"]),
        remote=st.booleans(),
    )
    def add(self, length: int, branch: int, at: int, salt: str, remote: bool) -> None:
        tokens = [index if index // BLOCK_SIZE < at else 100 * branch + index for index in range(length)]
        one = sequence(f"s{self.count}", tokens, salt)
        self.count += 1
        hits = self.manager.find_cached_blocks(one)
        assert len(hits) <= (length - 1) // BLOCK_SIZE, "a token must be left to compute"
        for block_id, block_hash in zip(hits, hash_blocks(tokens, BLOCK_SIZE, ROOT(salt)), strict=False):
            assert self.content[block_id] == block_hash, "the cache offered another prefix's block"
        if admit(self.manager, one, remote=remote):
            self.live[one.request_id] = one
            table = self.manager.block_table(one.request_id, length)
            assert table[: len(hits)] == tuple(hits)
            for block_id in table[len(hits) :]:
                self.content.pop(block_id, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        one = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        one.num_computed_tokens = min(one.num_tokens, one.num_computed_tokens + count)
        table = self.manager.block_table(one.request_id, one.num_tokens)
        hashes = hash_blocks(one.all_token_ids, BLOCK_SIZE, one.hash_root)
        for index in range(one.num_computed_tokens // BLOCK_SIZE):
            self.content[table[index]] = hashes[index]
        self.manager.register_computed(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["free", "hold", "quarantine"]))
    def end(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[name]
        getattr(self.manager, how)(name)
        if how != "free":
            (self.held if how == "hold" else self.quarantined).add(name)

    @precondition(lambda self: self.held | self.quarantined)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held | self.quarantined)))
        if name in self.held:
            assert not self.manager.release_quarantined(name)
            assert self.manager.release(name)
        else:
            assert not self.manager.release(name)
            assert self.manager.release_quarantined(name)
        self.held.discard(name)
        self.quarantined.discard(name)

    @invariant()
    def consistent(self) -> None:
        self.manager.check_invariants(self.live.values())
        stored, removed = self.manager.take_events()
        assert not set(stored) & self.cached
        assert set(removed) <= self.cached
        self.cached = self.cached - set(removed) | set(stored)
        assert self.cached == set(self.manager.snapshot()), "the events tell another story"

    def teardown(self) -> None:
        for name in list(self.live):
            self.manager.free(name)
        for name in self.held:
            self.manager.release(name)
        for name in self.quarantined:
            self.manager.release_quarantined(name)
        assert self.manager.load().blocks_free == self.manager.num_total_blocks == NUM_BLOCKS - 1


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    manager = KvCacheManager(7, BLOCK_SIZE, ROOT, prefix_caching=True)  # six blocks
    old, new = sequence("old", list(range(12))), sequence("new", list(range(50, 62)))
    for one in (old, new):
        assert admit(manager, one)
        one.num_computed_tokens = 12
        manager.register_computed(one)
        manager.free(one.request_id)
    big = sequence("big", list(range(90, 98)))  # two blocks: the tail of "old" goes
    assert admit(manager, big)
    assert len(manager.find_cached_blocks(sequence("again", [*range(12), 0]))) == 1
    assert len(manager.find_cached_blocks(sequence("again", [*range(50, 62), 0]))) == 3


def test_no_block_is_taken_when_there_are_too_few() -> None:
    manager = KvCacheManager(3, BLOCK_SIZE, ROOT, prefix_caching=True)
    assert not admit(manager, sequence("a", list(range(12))))
    assert manager.load().blocks_free == 2


def test_double_free_is_an_error() -> None:
    manager = KvCacheManager(3, BLOCK_SIZE, ROOT, prefix_caching=True)
    one = sequence("a", [1, 2])
    assert admit(manager, one)
    manager.free("a")
    with pytest.raises(BlockPoolError, match="double free"):
        manager.free("a")
