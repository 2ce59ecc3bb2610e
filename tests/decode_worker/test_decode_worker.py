"""A decode worker between its router and a prefill worker that is played by the test."""

from __future__ import annotations

import pytest

from cluster.messages import (
    Cancel,
    Generate,
    HandoffFenced,
    Message,
    Prefill,
    RequestError,
    RequestTimings,
    Sealed,
    TokenBatch,
    TokenOutput,
)
from decode_worker.decode_worker import DecodeWorker
from kv_transfer.transport import Peer
from tests.engine.prefix_runner import greedy, oracle
from tests.simulation.world import Packet, World

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

    def generate(self, request_id: str = "r", **fields: object) -> None:
        values = {
            "request_id": request_id,
            "attempt": 1,
            "prompt_token_ids": PROMPT,
            "sampling": greedy(4, ignore_eos=True),
            "prefill_worker": "prefill-0",
            **fields,
        }
        self.arrive(ROUTER, Generate(**values))  # type: ignore[arg-type]

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

    def seal(self, request_id: str = "r", **fields: object) -> None:
        """Write the prompt as the prefill worker would, and seal it."""
        values = {
            "request_id": request_id,
            "attempt": 1,
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

    @property
    def free_blocks(self) -> bool:
        load = self.decode.engine.load()
        return load.kv_blocks_free == load.kv_blocks_total


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
    assert bench.decode.engine.load().kv_blocks_reserved == 3
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


@pytest.mark.parametrize("how", ["refused", "gone"])
def test_a_prefill_worker_that_fails_costs_only_time(bench: Bench, how: str) -> None:
    bench.generate()
    if how == "refused":
        error = RequestError(code="draining", message="drains", retryable=True)
        bench.arrive(bench.prefill.peer, HandoffFenced(request_id="r", attempt=1, error=error))
    else:
        bench.world.crash("prefill-0")
        bench.world.update_members()
        bench.run()
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    assert bench.free_blocks


@pytest.mark.parametrize("how", ["fenced", "sealed", "gone"])
def test_cancelled_blocks_stay_in_quarantine_until_the_writer_has_stopped(bench: Bench, how: str) -> None:
    bench.generate()
    bench.arrive(ROUTER, Cancel(request_id="r", attempt=1))
    assert len(bench.sent(Cancel)) == 1
    assert bench.decode.engine.load().kv_blocks_quarantined == 3
    bench.world.clock.advance(3600)  # no timer frees them
    bench.role.on_tick()
    bench.run()
    assert bench.decode.engine.load().kv_blocks_quarantined == 3
    if how == "fenced":
        bench.arrive(bench.prefill.peer, HandoffFenced(request_id="r", attempt=1))
    elif how == "sealed":
        bench.seal()
    else:
        bench.world.crash("prefill-0")
        bench.world.update_members()
        bench.run()
    assert bench.free_blocks
    assert bench.role.num_active == 0
    assert bench.outputs() == []


def test_what_is_not_answered_is_sent_again(bench: Bench) -> None:
    bench.generate()
    bench.world.clock.advance(6)
    bench.role.on_tick()
    assert len(bench.sent(Prefill)) == 2
    bench.arrive(ROUTER, Cancel(request_id="r", attempt=1))
    bench.world.clock.advance(2)
    bench.role.on_tick()
    bench.role.on_tick()
    assert len(bench.sent(Cancel)) == 2


def test_a_seal_of_another_life_is_dropped(bench: Bench) -> None:
    bench.generate()
    bench.seal(incarnation=77)
    assert bench.tokens() == []
    assert bench.decode.engine.load().kv_blocks_reserved == 3


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
    assert bench.decode.engine.load().kv_blocks_quarantined == 3


def test_a_request_that_comes_twice_or_after_its_cancel_runs_once_or_never(bench: Bench) -> None:
    bench.generate(prefill_worker=None)
    bench.generate(prefill_worker=None)
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    bench.arrive(ROUTER, Cancel(request_id="late", attempt=1))
    bench.generate("late", prefill_worker=None)
    assert bench.role.num_active == 0
    assert len(bench.tokens()) == 4


def test_a_newer_attempt_replaces_the_older(bench: Bench) -> None:
    bench.generate()
    bench.generate(attempt=2, prefill_worker=None)
    assert {output.attempt for output in bench.outputs()} == {2}
    assert bench.tokens() == oracle(PROMPT, greedy(4, ignore_eos=True))
    assert bench.decode.engine.load().kv_blocks_quarantined == 3


def test_tokens_of_an_earlier_attempt_are_continued(bench: Bench) -> None:
    whole = oracle(PROMPT, greedy(4, ignore_eos=True))
    bench.generate(attempt=2, output_token_ids=whole[:2])
    assert bench.tokens() == whole[2:]


def test_a_lost_router_frees_its_requests_only(bench: Bench) -> None:
    bench.generate("mine")
    other = Peer("router-1", 4)
    bench.arrive(
        other, Generate(request_id="other", attempt=1, prompt_token_ids=[1, 2, 3, 4, 5], sampling=greedy(4))
    )
    bench.role.on_router_lost("router-0", 1)
    bench.run()
    assert bench.decode.engine.load().kv_blocks_quarantined == 3
    assert [output.request_id for output in bench.outputs() if output.finish_reason] == ["other"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"prompt_token_ids": [1] * 500}, "500"), ({"prompt_token_ids": [99]}, "prompt token 99")],
)
def test_a_request_that_cannot_run_fails_alone(bench: Bench, fields: dict[str, object], named: str) -> None:
    bench.generate("bad", **fields)
    (output,) = bench.outputs()
    assert output.error is not None
    assert output.error.code == "invalid_request"
    assert named in output.error.message
    assert not output.error.retryable
    assert bench.role.num_active == 0


def test_a_draining_worker_refuses_with_a_retryable_error(bench: Bench) -> None:
    bench.role.drain()
    bench.generate()
    (output,) = bench.outputs()
    assert output.error is not None
    assert output.error.code == "draining"
    assert output.error.retryable
