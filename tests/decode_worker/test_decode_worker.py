"""A decode worker between its router and a prefill worker that is played by the test."""

from __future__ import annotations

import pytest
import torch
import xxhash

from cluster.members import Peer
from cluster.messages import (
    Cancel,
    CancelPrefill,
    Generate,
    HandoffFenced,
    HandoffLanding,
    HandoffProgress,
    Message,
    Prefill,
    RequestError,
    RequestTimings,
    Sealed,
    TokenBatch,
    TokenOutput,
)
from cluster.sequence_spec import RequestKey, SequenceSpec
from decode_worker.decode_worker import DecodeWorker
from tests.engine.prefix_runner import greedy, oracle
from tests.sequence_specs import with_spec
from tests.simulation.under_way import Packet
from tests.simulation.world import BLOCK_SIZE, LEASE_S, World

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
ROUTER = Peer("router-0", 1)


class Bench:
    def __init__(self) -> None:
        self.world = World.connected()
        self.prefill, self.decode = self.world.workers["prefill-0"], self.world.workers["decode-0"]

    @property
    def role(self) -> DecodeWorker:
        assert isinstance(self.decode.role, DecodeWorker)
        return self.decode.role

    def generate(self, request_id: str = "r", attempt: int = 1, **fields: object) -> None:
        values = {
            "key": RequestKey(request_id, attempt),
            "prompt_token_ids": PROMPT,
            "sampling": greedy(4, ignore_eos=True),
            "prefill_worker": "prefill-0",
            **fields,
        }
        self.arrive(ROUTER, Generate(**with_spec(values)))

    def arrive(self, sender: Peer, message: Message, *, is_notification: bool = False) -> None:
        self.decode.receive(Packet(sender, "decode-0", message, is_notification))
        self.run()

    def run(self, steps: int = 12) -> None:
        for _ in range(steps):
            self.decode.step()
            self.decode.run_posts()

    def sent(self, kind: type[Message]) -> list[Message]:
        return [packet.message for packet in self.world.packets if isinstance(packet.message, kind)]

    def outputs(self) -> list[TokenOutput]:
        return [
            output
            for message in self.sent(TokenBatch)
            if isinstance(message, TokenBatch)
            for output in message.outputs
        ]

    def tokens(self) -> list[int]:
        return [token for output in self.outputs() for token in output.token_ids]

    def seal(self, request_id: str = "r", attempt: int = 1, **fields: object) -> None:
        """Write the prompt as the prefill worker would, and seal it."""
        values = {
            "key": RequestKey(request_id, attempt),
            "incarnation": self.prefill.peer.incarnation,
            "token_id": oracle(PROMPT, greedy())[0],
            "logprobs": None,
            "timings": RequestTimings(
                num_computed_tokens=len(PROMPT), prefill_worker="prefill-0", transfer_bytes=3
            ),
            **fields,
        }
        self.arrive(self.prefill.peer, Sealed(**values), is_notification=True)  # type: ignore[arg-type]

    def fill(self) -> None:
        (prefill,) = self.sent(Prefill)
        assert isinstance(prefill, Prefill)
        self.decode.runner.write(prefill.block_ids, 0, PROMPT)

    def fill_last_block(self, prefill: Prefill) -> None:
        """What the prefill worker of a prompt with a cached prefix writes."""
        kv, start = self.decode.runner.kv, prefill.first_block * BLOCK_SIZE
        tail = PROMPT[start:]
        kv[prefill.block_ids[-1], : len(tail)] = torch.tensor(tail)

    def progress(self, request_id: str = "r", **fields: int) -> None:
        landing = HandoffLanding(
            key=RequestKey(request_id, 1), **{"num_landed_blocks": 0, "num_bytes": 0, **fields}
        )
        self.arrive(self.prefill.peer, HandoffProgress(handoffs=[landing]))

    @property
    def free_blocks(self) -> bool:
        load = self.decode.engine.load()
        return load.kv.blocks_free == load.kv.blocks_total


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_reserve_stream_seal_activate(bench: Bench) -> None:
    bench.generate()
    (prefill,) = bench.sent(Prefill)
    assert isinstance(prefill, Prefill)
    assert prefill.first_block == 0
    assert len(prefill.block_ids) == 3
    assert prefill.prefill_incarnation == bench.prefill.peer.incarnation
    assert bench.decode.engine.load().kv.blocks_reserved == 3
    bench.fill()
    bench.seal()
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    assert bench.outputs()[-1].finish_reason == "length"
    timings = bench.outputs()[0].timings
    assert timings is not None
    assert timings.prefill_worker == "prefill-0"
    assert timings.num_computed_tokens == len(PROMPT)
    assert all(output.timings is None for output in bench.outputs()[1:])
    assert bench.free_blocks
    assert bench.role.num_active == 0


def test_a_cached_prefix_is_not_asked_for(bench: Bench) -> None:
    bench.generate("first", prefill_worker=None)
    bench.generate("second")
    (prefill,) = bench.sent(Prefill)
    assert isinstance(prefill, Prefill)
    assert prefill.first_block == 2
    assert len(prefill.block_ids) == 1


def test_without_a_prefill_worker_the_prompt_is_computed_here(bench: Bench) -> None:
    bench.generate(prefill_worker="prefill-9")
    assert bench.sent(Prefill) == []
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    timings = bench.outputs()[0].timings
    assert timings is not None
    assert timings.prefill_worker == ""
    assert timings.num_computed_tokens == len(PROMPT)


@pytest.mark.parametrize("how", ["refused", "gone", "broken connection", "silent"])
def test_when_a_prefill_worker_fails_the_router_is_asked_to_plan_anew(bench: Bench, how: str) -> None:
    bench.generate()
    if how == "refused":
        error = RequestError(code="draining", message="drains", retryable=True)
        bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("r", 1), error=error))
    elif how == "gone":
        bench.world.crash("prefill-0")
        bench.world.update_members()
    elif how == "broken connection":
        bench.decode.connections[bench.prefill.peer].on_disconnected()
    else:
        bench.world.clock.advance(LEASE_S)
        bench.role.on_tick()
    bench.run()
    (output,) = bench.outputs()
    assert output.error is not None
    assert (output.error.code, output.error.worker, output.error.retryable) == (
        "prefill_failed",
        "prefill-0",
        True,
    )
    assert output.timings is None
    may_still_write = how in ("broken connection", "silent")
    assert bench.decode.engine.load().kv.blocks_quarantined == (3 if may_still_write else 0)
    assert len(bench.sent(CancelPrefill)) == may_still_write
    if may_still_write:
        bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("r", 1)))
    assert bench.free_blocks
    assert bench.role.num_active == 0


def test_what_has_landed_is_kept_for_the_next_attempt(bench: Bench) -> None:
    bench.generate()
    bench.fill()
    bench.progress(num_landed_blocks=2)
    bench.decode.connections[bench.prefill.peer].on_disconnected()
    bench.run()
    assert bench.decode.engine.load().kv.blocks_quarantined == 1, "landed blocks are not written again"
    bench.generate(attempt=2)
    again = bench.sent(Prefill)[-1]
    assert isinstance(again, Prefill)
    assert (again.key.attempt, again.first_block, len(again.block_ids)) == (2, 2, 1)
    bench.fill_last_block(again)
    bench.seal(attempt=2)
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("r", 1)))
    assert bench.free_blocks


def test_a_writer_that_is_heard_of_keeps_its_lease(bench: Bench) -> None:
    bench.generate()
    for _ in range(5):
        bench.world.clock.advance(LEASE_S - 0.1)
        bench.progress(num_landed_blocks=0)
        bench.role.on_tick()
    bench.run()
    assert bench.outputs() == []
    assert bench.decode.engine.load().kv.blocks_reserved == 3


def test_a_handoff_that_only_the_prefill_worker_knows_is_cancelled(bench: Bench) -> None:
    bench.generate()  # which connects the two
    bench.progress(request_id="forgotten", num_landed_blocks=1)
    assert bench.sent(CancelPrefill) == [CancelPrefill(key=RequestKey("forgotten", 1), reason="unknown here")]


@pytest.mark.parametrize("is_right", [True, False])
def test_blocks_that_are_not_what_was_sent_are_computed_again(bench: Bench, is_right: bool) -> None:
    bench.generate()
    bench.fill()
    (prefill,) = bench.sent(Prefill)
    assert isinstance(prefill, Prefill)
    kv = bench.decode.runner.kv
    checksums = [
        (index, xxhash.xxh3_64_intdigest(kv[block_id].numpy().tobytes()))
        for index, block_id in enumerate(prefill.block_ids)
    ]
    if not is_right:
        kv[prefill.block_ids[1], 2] += 1  # one wrong value on the way
    bench.seal(checksums=checksums)
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    assert len(bench.decode.events.corrupted) == (not is_right)
    timings = bench.outputs()[0].timings
    assert timings is not None
    assert timings.prefill_worker == ("prefill-0" if is_right else "")
    assert bench.free_blocks
    assert bench.role.num_active == 0


@pytest.mark.parametrize("how", ["fenced", "sealed", "gone"])
def test_cancelled_blocks_stay_in_quarantine_until_the_writer_has_stopped(bench: Bench, how: str) -> None:
    bench.generate()
    bench.arrive(ROUTER, Cancel(key=RequestKey("r", 1)))
    assert len(bench.sent(CancelPrefill)) == 1
    assert bench.decode.engine.load().kv.blocks_quarantined == 3
    bench.world.clock.advance(3600)  # no timer frees them
    bench.role.on_tick()
    bench.run()
    assert bench.decode.engine.load().kv.blocks_quarantined == 3
    if how == "fenced":
        bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("r", 1)))
    elif how == "sealed":
        bench.seal()
    else:
        bench.world.crash("prefill-0")
        bench.world.update_members()
        bench.run()
    assert bench.free_blocks
    assert bench.role.num_active == 0
    assert bench.outputs() == []


def test_a_cancel_is_repeated_until_it_is_answered(bench: Bench) -> None:
    bench.generate()
    bench.arrive(ROUTER, Cancel(key=RequestKey("r", 1)))
    for _ in range(3):
        bench.world.clock.advance(1)
        bench.role.on_tick()
        bench.role.on_tick()
    assert len(bench.sent(CancelPrefill)) == 4
    bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("r", 1)))
    bench.world.clock.advance(2)
    bench.role.on_tick()
    assert len(bench.sent(CancelPrefill)) == 4


def test_a_seal_of_another_life_is_dropped(bench: Bench) -> None:
    bench.generate()
    bench.seal(incarnation=77)
    assert bench.tokens() == []
    assert bench.decode.engine.load().kv.blocks_reserved == 3


def test_a_first_token_that_does_not_exist_fails_the_request_and_frees_its_blocks(bench: Bench) -> None:
    bench.generate()
    bench.seal(token_id=10**6)
    (output,) = bench.outputs()
    assert output.error is not None
    assert output.error.code == "handoff_failed"
    assert output.error.retryable
    assert bench.free_blocks
    assert bench.role.num_active == 0


def test_the_deadline_ends_a_request_with_an_error(bench: Bench) -> None:
    bench.generate(deadline=bench.world.clock.unix() + 5)
    bench.world.clock.advance(6)
    bench.role.on_tick()
    bench.run()
    (output,) = bench.outputs()
    assert output.error is not None
    assert output.error.code == "deadline_exceeded"
    assert bench.decode.engine.load().kv.blocks_quarantined == 3


def test_a_request_that_comes_twice_or_after_its_cancel_runs_once_or_never(bench: Bench) -> None:
    bench.generate(prefill_worker=None)
    bench.generate(prefill_worker=None)
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    bench.arrive(ROUTER, Cancel(key=RequestKey("late", 1)))
    bench.generate("late", prefill_worker=None)
    assert bench.role.num_active == 0
    assert len(bench.tokens()) == 4


def test_a_newer_attempt_replaces_the_older(bench: Bench) -> None:
    bench.generate()
    bench.generate(attempt=2, prefill_worker=None)
    assert {output.key.attempt for output in bench.outputs()} == {2}
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    assert bench.decode.engine.load().kv.blocks_quarantined == 3


@pytest.mark.parametrize("prefill_worker", [None, "prefill-0"])
def test_tokens_of_an_earlier_attempt_are_continued(bench: Bench, prefill_worker: str | None) -> None:
    whole = oracle(PROMPT, greedy(4, ignore_eos=True))
    bench.generate(attempt=2, output_token_ids=whole[:2], prefill_worker=prefill_worker)
    if prefill_worker is not None:
        (prefill,) = bench.sent(Prefill)
        assert isinstance(prefill, Prefill)
        assert (prefill.spec.prompt_token_ids, prefill.spec.output_token_ids) == (PROMPT, whole[:2])
        bench.decode.runner.write(prefill.block_ids, 0, PROMPT + whole[:2])
        bench.seal(attempt=2, token_id=whole[2])
    assert bench.tokens() == whole[2:]


def test_a_lost_router_frees_its_requests_only(bench: Bench) -> None:
    bench.generate("mine")
    other = Peer("router-1", 4)
    bench.arrive(
        other,
        Generate(
            key=RequestKey("other", 1),
            spec=SequenceSpec(prompt_token_ids=[1, 2, 3, 4, 5], sampling=greedy(4)),
        ),
    )
    bench.role.on_router_lost("router-0", 1)
    bench.run()
    assert bench.decode.engine.load().kv.blocks_quarantined == 3
    assert [output.key.request_id for output in bench.outputs() if output.finish_reason] == ["other"]


def test_a_draining_worker_refuses_with_a_retryable_error(bench: Bench) -> None:
    bench.role.drain()
    bench.generate()
    (output,) = bench.outputs()
    assert output.error is not None
    assert output.error.code == "draining"
    assert output.error.retryable


def test_a_worker_that_ends_leaves_its_requests_to_others(bench: Bench) -> None:
    bench.generate("local", prefill_worker=None, sampling=greedy(400, ignore_eos=True))
    bench.generate("remote")  # two of its three blocks are cached by now
    bench.role.drain()
    bench.role.abandon("draining")
    bench.run()
    errors = {output.key.request_id: output.error for output in bench.outputs() if output.error is not None}
    assert sorted(errors) == ["local", "remote"]
    assert all(error.code == "draining" and error.retryable for error in errors.values())
    assert bench.decode.engine.load().kv.blocks_quarantined == 1, "the prefill worker may still write"
    bench.arrive(bench.prefill.peer, HandoffFenced(key=RequestKey("remote", 1)))
    assert bench.free_blocks
    assert bench.role.num_active == 0
