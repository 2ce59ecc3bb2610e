"""A prefill worker's answers to what arrives late, twice, in the wrong order, or for another life of it."""

from __future__ import annotations

import pytest
import xxhash

from cluster.malformed import MalformedMessage
from cluster.members import Peer
from cluster.messages import CancelPrefill, Generate, HandoffFenced, HandoffProgress, Message, Prefill, Sealed
from cluster.sequence_spec import RequestKey, SequenceSpec
from prefill_worker.prefill_worker import PrefillWorker
from tests.engine.prefix_runner import greedy, oracle
from tests.sequence_specs import with_spec
from tests.simulation.under_way import Packet
from tests.simulation.world import REGISTRY, Worker, World

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class Bench:
    """A world whose decode worker is played by the test: it sends what it likes."""

    def __init__(self) -> None:
        self.world = World.connected()
        self.prefill, self.decode = self.world.workers["prefill-0"], self.world.workers["decode-0"]

    @property
    def role(self) -> PrefillWorker:
        assert isinstance(self.prefill.role, PrefillWorker)
        return self.prefill.role

    def prefill_message(self, request_id: str = "r", attempt: int = 1, **fields: object) -> Prefill:
        values = {
            "key": RequestKey(request_id, attempt),
            "prompt_token_ids": PROMPT,
            "sampling": greedy(),
            "prefill_incarnation": self.prefill.peer.incarnation,
            "first_block": 0,
            "block_ids": [5, 6, 7],
            **fields,
        }
        return Prefill(**with_spec(values))

    def arrive(self, message: Message) -> None:
        self.prefill.receive(Packet(self.decode.peer, "prefill-0", message))
        self.prefill.run_posts()

    def run(self, steps: int = 6) -> None:
        for _ in range(steps):
            self.prefill.step()
            self.prefill.run_posts()

    def land_all(self) -> None:
        while self.world.writes:
            self.world.land(self.world.writes[0])
            self.prefill.run_posts()

    def answers(self) -> list[Message]:
        """All but progress."""
        sent = [packet.message for packet in self.world.packets]
        return [message for message in sent if not isinstance(message, HandoffProgress)]

    def landings(self) -> list[tuple[str, int, int]]:
        """(request, blocks landed, bytes) of each progress message, in order."""
        return [
            (landing.key.request_id, landing.num_landed_blocks, landing.num_bytes)
            for packet in self.world.packets
            if isinstance(packet.message, HandoffProgress)
            for landing in packet.message.handoffs
        ]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def free_everywhere(worker: Worker) -> bool:
    load = worker.engine.load()
    return load.kv.blocks_free == load.kv.blocks_total


def test_chunks_are_pushed_as_they_finish_and_sealed_after_the_last_has_landed(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    assert [write.remote_ids for write in bench.world.writes] == [(5, 6)]  # 8 tokens computed: two blocks
    bench.run()
    assert [write.remote_ids for write in bench.world.writes] == [(5, 6), (7,)]  # with the partial one
    bench.world.land(bench.world.writes[1])
    bench.prefill.run_posts()
    assert bench.answers() == [], "sealed before everything had landed"
    bench.land_all()
    (sealed,) = bench.answers()
    assert isinstance(sealed, Sealed)
    assert sealed.token_id == oracle(PROMPT, greedy())[0]
    assert sealed.timings.num_computed_tokens == len(PROMPT)
    assert bench.decode.runner.kv[[5, 6, 7]].flatten()[: len(PROMPT)].tolist() == PROMPT
    bench.run()
    assert free_everywhere(bench.prefill)
    assert bench.role.num_active == 0


def test_only_what_the_decode_worker_lacks_is_written(bench: Bench) -> None:
    bench.arrive(bench.prefill_message(first_block=2, block_ids=[7]))
    bench.run()
    assert [write.remote_ids for write in bench.world.writes] == [(7,)]


def test_a_message_that_comes_twice_is_one_request(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    bench.arrive(bench.prefill_message())
    bench.run()
    bench.land_all()
    assert [type(answer) for answer in bench.answers()] == [Sealed]
    bench.arrive(bench.prefill_message())  # and once more, when it is over
    bench.run()
    assert bench.world.writes == []
    assert [type(answer) for answer in bench.answers()] == [Sealed, HandoffFenced]


def test_a_cancel_is_confirmed_only_after_the_write_under_way_has_ended(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    bench.arrive(CancelPrefill(key=RequestKey("r", 1), reason="client"))
    bench.run()
    assert bench.answers() == []
    pinned = bench.prefill.engine.load().kv.blocks_pinned
    assert pinned >= 2, "blocks that are being read were freed"
    bench.land_all()
    assert bench.answers() == [HandoffFenced(key=RequestKey("r", 1))]
    bench.run()
    assert free_everywhere(bench.prefill)


def test_a_request_that_arrives_after_its_cancel_does_not_start(bench: Bench) -> None:
    bench.arrive(CancelPrefill(key=RequestKey("r", 1), reason="client"))
    bench.arrive(bench.prefill_message())
    bench.run()
    assert bench.world.writes == []
    assert bench.answers() == [HandoffFenced(key=RequestKey("r", 1))] * 2
    assert bench.role.num_active == 0


def test_another_life_of_the_worker_does_not_write(bench: Bench) -> None:
    bench.arrive(bench.prefill_message(prefill_incarnation=99))
    bench.run()
    assert bench.world.writes == []
    assert bench.role.num_active == 0


def test_a_failed_write_is_told_after_all_writes_have_ended(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run()
    first, second = bench.world.writes
    bench.world.fail(first)
    bench.prefill.run_posts()
    assert bench.answers() == []
    bench.world.land(second)
    bench.prefill.run_posts()
    (answer,) = bench.answers()
    assert isinstance(answer, HandoffFenced)
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    assert answer.error.retryable


def test_too_few_target_blocks_are_refused_with_the_numbers(bench: Bench) -> None:
    bench.arrive(bench.prefill_message(block_ids=[5, 6]))
    (answer,) = bench.answers()
    assert isinstance(answer, HandoffFenced)
    assert answer.error is not None
    assert "9 tokens has 3 blocks" in answer.error.message
    assert bench.role.num_active == 0


def test_a_lost_decode_worker_frees_its_blocks(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    bench.world.crash("decode-0")
    bench.world.update_members()
    bench.run()
    assert free_everywhere(bench.prefill)
    assert bench.role.num_active == 0


def test_a_draining_worker_refuses_new_prompts_and_finishes_old_ones(bench: Bench) -> None:
    bench.arrive(bench.prefill_message("old"))
    bench.role.drain()
    bench.arrive(bench.prefill_message("new", block_ids=[9, 10, 11]))
    bench.run()
    bench.land_all()
    refused, sealed = bench.answers()
    assert isinstance(refused, HandoffFenced)
    assert refused.error is not None
    assert refused.error.code == "draining"
    assert isinstance(sealed, Sealed)
    assert sealed.key.request_id == "old"


def test_a_decode_worker_that_is_not_connected_yet_is_waited_for_and_then_refused(bench: Bench) -> None:
    stranger = Peer("decode-7", 3)
    bench.prefill.receive(Packet(stranger, "prefill-0", bench.prefill_message("early")))
    bench.run()
    assert bench.answers() == []
    assert bench.role.num_active == 1
    bench.world.clock.advance(6)
    bench.role.on_tick()
    (answer,) = bench.answers()
    assert isinstance(answer, HandoffFenced)
    assert answer.error is not None
    assert "decode-7" in answer.error.message


def test_a_worker_that_stood_still_writes_no_more(bench: Bench) -> None:
    """It may have been taken for dead, and its target blocks may be somebody else's."""
    bench.arrive(bench.prefill_message())
    bench.prefill.step()
    bench.world.clock.advance(10)
    bench.run()
    assert bench.world.writes == []
    (answer,) = bench.answers()
    assert isinstance(answer, HandoffFenced)
    assert answer.error is not None
    assert answer.error.code == "stalled"
    assert free_everywhere(bench.prefill)


def test_messages_for_other_roles_are_dropped(bench: Bench) -> None:
    bench.arrive(
        Generate(key=RequestKey("r", 1), spec=SequenceSpec(prompt_token_ids=PROMPT, sampling=greedy()))
    )
    assert bench.role.num_active == 0


def test_a_duplicate_during_a_drain_does_not_call_off_what_is_being_written(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    bench.role.drain()
    bench.arrive(bench.prefill_message())
    assert bench.answers() == [], "the decode worker would take its blocks back under the writer"
    bench.run()
    bench.land_all()
    assert [type(answer) for answer in bench.answers()] == [Sealed]


def test_landed_blocks_are_told_in_order_of_the_prompt(bench: Bench) -> None:
    bench.arrive(bench.prefill_message(prompt_token_ids=list(range(20)), block_ids=[5, 6, 7, 8, 9]))
    bench.run(2)
    first, second = bench.world.writes
    bench.world.land(second)
    bench.prefill.run_posts()
    bench.world.land(first)
    bench.prefill.run_posts()
    # The later write alone says nothing of the blocks before it.
    assert [blocks for _, blocks, _ in bench.landings()] == [0, 4]


def test_heartbeats_name_what_is_in_hand(bench: Bench) -> None:
    bench.arrive(bench.prefill_message("a"))
    bench.arrive(bench.prefill_message("b", block_ids=[8, 9, 10]))
    bench.arrive(CancelPrefill(key=RequestKey("b", 1), reason="client"))
    bench.world.clock.advance(REGISTRY.heartbeat_ms / 1000)
    bench.role.on_tick()
    bench.role.on_tick()
    assert bench.landings() == [("a", 0, 0)]


def test_a_heartbeat_that_cannot_be_delivered_stops_the_prompts_of_that_worker(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    bench.prefill.is_cut_off = True
    bench.world.clock.advance(REGISTRY.heartbeat_ms / 1000)
    bench.role.on_tick()
    bench.land_all()
    bench.run()
    assert bench.role.num_active == 0
    assert free_everywhere(bench.prefill)


def test_the_seal_brings_checksums_of_what_was_sent(bench: Bench) -> None:
    bench.arrive(bench.prefill_message(first_block=1, block_ids=[6, 7]))
    bench.run()
    writes = list(bench.world.writes)
    bench.land_all()
    (sealed,) = bench.answers()
    assert isinstance(sealed, Sealed)
    local = [block_id for write in writes for block_id in write.local_ids]
    kv = bench.prefill.runner.kv
    assert sealed.checksums == [
        (index, xxhash.xxh3_64_intdigest(kv[block_id].numpy().tobytes()))
        for index, block_id in enumerate(local)
    ]


def test_tokens_of_an_earlier_attempt_are_part_of_the_prompt(bench: Bench) -> None:
    whole = oracle(PROMPT, greedy(4, ignore_eos=True))
    bench.arrive(bench.prefill_message(sampling=greedy(4, ignore_eos=True), output_token_ids=whole[:3]))
    bench.run()
    bench.land_all()
    (sealed,) = bench.answers()
    assert isinstance(sealed, Sealed)
    assert sealed.token_id == whole[3]


def test_the_deadline_stops_a_prefill_even_when_its_write_hangs(bench: Bench) -> None:
    bench.arrive(bench.prefill_message(deadline=bench.world.clock.unix() + 5))
    bench.run()
    for _ in range(3):
        bench.world.clock.advance(2)
        bench.role.on_tick()
    assert bench.answers() == [], "a write is under way"
    bench.land_all()
    (fenced,) = bench.answers()
    assert isinstance(fenced, HandoffFenced)
    assert fenced.error is not None
    assert fenced.error.code == "deadline_exceeded"


def test_a_worker_that_ends_says_so_after_its_writes(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    bench.role.drain()
    bench.role.abandon("draining")
    assert bench.answers() == []
    bench.land_all()
    (fenced,) = bench.answers()
    assert isinstance(fenced, HandoffFenced)
    assert fenced.error is not None
    assert (fenced.error.code, fenced.error.retryable) == ("draining", True)
    bench.run()
    assert bench.role.num_active == 0


@pytest.mark.parametrize(
    ("fields", "code", "retryable"),
    [
        ({"sampling": greedy(min_p=7.0)}, "invalid_request", False),
        ({"prompt_token_ids": [99, *PROMPT[1:]]}, "invalid_request", False),
        ({"sampling": greedy(min_tokens=4, stop_token_ids=tuple(range(23)))}, "invalid_request", False),
        ({"prompt_token_ids": [1] * 500, "block_ids": list(range(125))}, "prefill_refused", True),
    ],
    ids=["parameter", "token", "nothing allowed", "too long for this worker"],
)
def test_an_invalid_prompt_is_no_other_worker_s_to_try(
    bench: Bench, fields: dict[str, object], code: str, retryable: bool
) -> None:
    bench.arrive(bench.prefill_message(**fields))
    bench.run()
    bench.land_all()
    (fenced,) = bench.answers()
    assert isinstance(fenced, HandoffFenced)
    assert fenced.error is not None
    assert (fenced.error.code, fenced.error.retryable) == (code, retryable)
    assert bench.role.num_active == 0
    bench.run(1)
    assert free_everywhere(bench.prefill)


def test_a_prompt_that_cannot_be_read_is_answered_and_never_written(bench: Bench) -> None:
    malformed = MalformedMessage(
        sender="decode-0",
        incarnation=bench.decode.peer.incarnation,
        kind="prefill",
        key=RequestKey("r", 1),
        reason="Expected `int`, got `str` - at `$.first_block`",
    )
    bench.prefill.server.receive_malformed(malformed)
    (fenced,) = bench.answers()
    assert isinstance(fenced, HandoffFenced)
    assert fenced.error is not None
    assert (fenced.error.code, fenced.error.retryable) == ("undecodable_message", False)
    assert "$.first_block" in fenced.error.message
    bench.arrive(bench.prefill_message())  # the decode worker repeats what it heard no answer to
    bench.run()
    assert bench.world.writes == []
    assert bench.answers()[1:] == [HandoffFenced(key=RequestKey("r", 1))]


def test_a_message_that_arrives_damaged_does_not_disturb_the_prompt_in_hand(bench: Bench) -> None:
    bench.arrive(bench.prefill_message())
    bench.run(1)
    malformed = MalformedMessage(
        sender="decode-0",
        incarnation=bench.decode.peer.incarnation,
        kind="prefill",
        key=RequestKey("r", 1),
        reason="truncated",
    )
    bench.prefill.server.receive_malformed(malformed)
    assert bench.answers() == [], "its blocks are being written: no fence may be promised"
    bench.run()
    bench.land_all()
    (sealed,) = bench.answers()
    assert isinstance(sealed, Sealed)
