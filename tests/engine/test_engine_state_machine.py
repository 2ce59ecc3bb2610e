"""Random walks over all that an engine can be asked to do, against undisturbed runs of the same requests."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.sampling_params import SamplingParams
from engine.step_result import Reservation
from tests.engine.prefix_runner import VOCAB_SIZE, Collector, greedy, make_engine, new_request, oracle

BLOCK_SIZE = 4
NUM_BLOCKS = 13  # 48 tokens: two of the longer requests already crowd each other out
SHARED = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11]

prompts = st.builds(
    lambda shared, tail: SHARED[:shared] + tail,
    st.integers(0, len(SHARED)),
    st.lists(st.integers(0, 3), min_size=1, max_size=14),
)
samplings = st.sampled_from(
    [
        greedy(1),
        greedy(6),
        greedy(18, ignore_eos=True),
        greedy(5, min_tokens=4, stop_token_ids=(3, 4)),
        greedy(10, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25, logprobs=2),
        SamplingParams(max_tokens=12, seed=5, temperature=1.0),
        SamplingParams(max_tokens=9, seed=6, temperature=1.5, top_k=7, top_p=0.8, min_p=0.01),
    ]
)


@functools.cache
def expected_tokens(prompt: tuple[int, ...], sampling: bytes, output: tuple[int, ...]) -> list[int]:
    return oracle(prompt, _decode(sampling), output)


@functools.cache
def _decode(sampling: bytes) -> SamplingParams:
    import msgspec

    return msgspec.msgpack.decode(sampling, type=SamplingParams)


def _encode(sampling: SamplingParams) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(sampling)


@dataclass
class Tracked:
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    kind: str  # "local" | "remote" | "prefill_only"
    reservation: Reservation | None = None
    num_landed: int = 0
    writable_from: int = 0  # first position that a fenced writer may still write
    progress: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()

    @property
    def expected(self) -> list[int]:
        return expected_tokens(tuple(self.prompt), _encode(self.sampling), tuple(self.output))

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine, self.runner = make_engine(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=10,
            max_num_seqs=5,
            watermark=0.05,
            long_prefill_token_threshold=6,
        )
        self.collector = Collector(self.engine)
        self.live: dict[str, Tracked] = {}
        self.held: dict[str, Tracked] = {}
        self.quarantined: dict[str, Tracked] = {}
        self.count = 0

    @rule(
        prompt=prompts,
        sampling=samplings,
        kind=st.sampled_from(["local", "local", "remote", "prefill_only"]),
        num_output=st.sampled_from([0, 0, 2]),
    )
    def add(self, prompt: list[int], sampling: SamplingParams, kind: str, num_output: int) -> None:
        output = [1, 2][:num_output] if sampling.max_tokens > num_output else []
        request_id = f"{kind}-{self.count}"
        self.count += 1
        self.live[request_id] = Tracked(prompt, output, sampling, kind)
        self.engine.add_request(
            new_request(
                request_id,
                prompt,
                sampling,
                output_token_ids=output,
                remote_prefill=kind == "remote",
                prefill_only=kind == "prefill_only",
            ),
            self.collector.now,
        )

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: len(self.collector.in_flight) < 3)
    @rule()
    def launch(self) -> None:
        """A step whose results are taken in later: what comes between must not harm it."""
        self.collector.launch()

    def _step(self) -> None:
        result = self.collector.step()
        for reservation in result.reservations:
            tracked = self.live[reservation.request_id]
            assert tracked.reservation is None
            tracked.reservation = reservation
            tracked.num_landed = reservation.num_cached_tokens
            assert len(reservation.block_ids) == -(-len(tracked.tokens) // BLOCK_SIZE)
            assert reservation.num_cached_tokens % BLOCK_SIZE == 0
            assert reservation.num_cached_tokens < len(tracked.tokens)
        for progress in result.progress:
            tracked = self.live[progress.request_id]
            assert progress.is_first_chunk == (not tracked.progress)
            assert progress.num_computed_tokens > (tracked.progress or [progress.num_cached_tokens])[-1]
            assert progress.block_ids[: len(tracked.table)] == tracked.table, "the table only grows"
            tracked.progress.append(progress.num_computed_tokens)
            tracked.table = progress.block_ids
        for output in result.outputs:
            tracked = self.live[output.request_id]
            if tracked.sampling.logprobs is not None and output.token_ids and tracked.kind != "remote":
                assert output.logprobs is not None
            if output.finish_reason is None:
                continue
            del self.live[output.request_id]
            if tracked.kind == "prefill_only":
                self.held[output.request_id] = tracked
            if output.finish_reason != "error":
                self._check_tokens(output.request_id, tracked)

    def _check_tokens(self, request_id: str, tracked: Tracked) -> None:
        expected = tracked.expected[:1] if tracked.kind == "prefill_only" else tracked.expected
        assert self.collector.tokens[request_id] == expected, request_id

    @rule()
    def failing_step(self) -> None:
        while self.collector.in_flight:
            self._step()
        self.runner.fail_next = True
        before = set(self.engine.cached_block_hashes())
        self._step()
        if not self.runner.fail_next:
            assert set(self.engine.cached_block_hashes()) <= before, "a failed step fed the prefix cache"
        self.runner.fail_next = False

    # --- the peer ------------------------------------------------------------------------------------------

    def _reserved(self) -> list[str]:
        return [request_id for request_id, tracked in self.live.items() if tracked.reservation]

    def _unreported(self) -> list[str]:
        """Those with blocks reserved by a step in flight: no peer knows of them yet."""
        reservations = [one for step in self.collector.in_flight for one in step.scheduled.reservations]
        return [one.request_id for one in reservations if one.request_id in self.live]

    def _peer_writes(self, tracked: Tracked, until: int) -> None:
        assert tracked.reservation is not None
        start, until = tracked.num_landed, min(until, len(tracked.tokens))
        if until > start:
            self.runner.write(tracked.reservation.block_ids, start, tracked.tokens[start:until])
            tracked.num_landed = until

    @precondition(lambda self: self._reserved())
    @rule(data=st.data(), count=st.integers(1, 9))
    def peer_write(self, data: st.DataObject, count: int) -> None:
        tracked = self.live[data.draw(st.sampled_from(self._reserved()))]
        self._peer_writes(tracked, tracked.num_landed + count)

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        self._activate(data.draw(st.sampled_from(self._reserved())))

    def _activate(self, request_id: str) -> None:
        tracked = self.live[request_id]
        self._peer_writes(tracked, len(tracked.tokens))
        tracked.reservation = None
        self.engine.activate(request_id, tracked.expected[0], None)
        self.engine.check_invariants()

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def fail_remote(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._reserved()))
        tracked = self.live[request_id]
        landed = tracked.num_landed if data.draw(st.booleans()) else 0
        if landed == 0 and tracked.reservation and tracked.reservation.num_cached_tokens == 0:
            self.runner.write(tracked.reservation.block_ids, 0, [VOCAB_SIZE + 5] * len(tracked.tokens))
        tracked.reservation = None
        self.engine.fail_remote(request_id, landed)
        self.engine.check_invariants()

    @precondition(lambda self: self._reserved())
    @rule(data=st.data(), quarantine=st.booleans())
    def give_up_remote(self, data: st.DataObject, quarantine: bool) -> None:
        """It ends with an error; what has landed is found by later prompts, and must be right."""
        request_id = data.draw(st.sampled_from(self._reserved()))
        tracked = self.live[request_id]
        landed = min(tracked.num_landed, len(tracked.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.engine.give_up_remote(request_id, tracked.num_landed, "no peer", quarantine=quarantine)
        if quarantine:
            self.quarantined[request_id] = replace(tracked, writable_from=landed)
        tracked.reservation = None
        self.engine.check_invariants()

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def fenced_peer_writes(self, data: st.DataObject) -> None:
        tracked = self.quarantined[data.draw(st.sampled_from(sorted(self.quarantined)))]
        assert tracked.reservation is not None
        start = tracked.writable_from
        garbage = [VOCAB_SIZE + 9] * (len(tracked.tokens) - start)
        self.runner.write(tracked.reservation.block_ids, start, garbage)

    # --- ends ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def abort(self, data: st.DataObject, keep: bool) -> None:
        request_id = data.draw(st.sampled_from(list(self.live)))
        unreported = request_id in self._unreported()
        tracked = self.live.pop(request_id)
        if tracked.kind == "prefill_only":
            assert self.engine.abort(request_id, hold=keep)
            if keep and tracked.progress:
                self.held[request_id] = tracked
            elif keep:
                self.engine.release(request_id)  # it may have blocks or not
        else:
            known = self.engine.abort(request_id, quarantine=keep and not unreported)
            if tracked.reservation is not None:
                assert known
                if keep:
                    tracked.writable_from = tracked.reservation.num_cached_tokens
                    self.quarantined[request_id] = tracked
        assert not self.engine.abort(request_id)
        self.collector.finished.pop(request_id, None)
        self.engine.check_invariants()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.held))))

    def _release(self, request_id: str) -> None:
        tracked = self.held.pop(request_id)
        if tracked.table:
            kv = self.runner.kv[list(tracked.table)].flatten()[: tracked.progress[-1]]
            assert kv.tolist() == tracked.tokens[: tracked.progress[-1]], "held blocks were overwritten"
        assert self.engine.release(request_id)
        assert not self.engine.release(request_id)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release_quarantined(self, data: st.DataObject) -> None:
        self._release_quarantined(data.draw(st.sampled_from(sorted(self.quarantined))))

    def _release_quarantined(self, request_id: str) -> None:
        del self.quarantined[request_id]
        assert self.engine.release_quarantined(request_id)
        assert not self.engine.release_quarantined(request_id)

    @invariant()
    def consistent(self) -> None:
        self.engine.check_invariants()
        load = self.engine.load()
        assert load.kv.blocks_total == NUM_BLOCKS - 1
        assert 0 <= load.kv.blocks_cached <= load.kv.blocks_free <= load.kv.blocks_total
        reserved = [*self._reserved(), *self._unreported()]
        assert load.queue.waiting_for_remote_kv == len(reserved)
        assert (load.kv.blocks_reserved > 0) == bool(reserved)
        assert (load.kv.blocks_quarantined > 0) == bool(self.quarantined)
        assert (load.kv.blocks_pinned > 0) == bool(self.held)

    def teardown(self) -> None:
        for _ in range(3000):
            for request_id in self._reserved():
                self._activate(request_id)
            for request_id in list(self.held):
                self._release(request_id)
            for request_id in list(self.quarantined):
                self._release_quarantined(request_id)
            if not (self.engine.has_work() or self.collector.in_flight or self._reserved()):
                break
            self._step()
        for request_id in list(self.held):
            self._release(request_id)
        assert not self.live, f"never finished: {self.live}"
        load = self.engine.load()
        assert load.kv.blocks_free == load.kv.blocks_total
        queue, kv = load.queue, load.kv
        assert queue.running == queue.waiting == queue.waiting_for_remote_kv == 0
        assert kv.blocks_pinned == kv.blocks_reserved == kv.blocks_quarantined == 0


EngineMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target),  # shrinking takes minutes
)
TestEngineMachine = EngineMachine.TestCase
