"""Random interleavings of a router, a prefill worker and a decode worker, with losses, doubles and crashes.

After every step no block is both free and writable by a peer. In the end, when messages arrive again, every
request has ended exactly once with the undisturbed tokens or an error, and every block is free.
"""

from __future__ import annotations

import functools

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.messages import Cancel, Generate, TokenBatch
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import RequestKey, SequenceSpec
from tests.engine.prefix_runner import greedy, oracle
from tests.simulation.world import REPAIRABLE, World

SHARED = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11]
SAMPLINGS = [
    greedy(1),
    greedy(5),
    greedy(9, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=5, temperature=1.0),
]
seldom = st.sampled_from([False, False, False, False, True])


@functools.cache
def expected(prompt: tuple[int, ...], sampling: int) -> list[int]:
    return oracle(prompt, SAMPLINGS[sampling])


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World.connected()
        self.samplings: dict[str, int] = {}

    def _run_posts(self) -> None:
        for worker in self.world.workers.values():
            if worker.is_alive:
                worker.run_posts()

    @rule(
        shared=st.integers(0, len(SHARED)),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        remote=st.sampled_from([True, True, True, False]),
        has_deadline=st.booleans(),
    )
    def generate(self, shared: int, tail: list[int], sampling: int, remote: bool, has_deadline: bool) -> None:
        name = f"r{len(self.samplings)}"
        self.samplings[name] = sampling
        self.world.send_generate(
            Generate(
                key=RequestKey(name, 1),
                spec=SequenceSpec(
                    prompt_token_ids=SHARED[:shared] + tail,
                    sampling=SAMPLINGS[sampling],
                    deadline=self.world.clock.unix() + 30 if has_deadline else 0.0,
                ),
                prefill_worker="prefill-0" if remote else None,
            )
        )

    @precondition(lambda self: self._cancellable())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self._cancellable())))

    def _cancellable(self) -> list[str]:
        return [
            name
            for name, answer in self.world.answers.items()
            if not answer.is_cancelled and not answer.endings
        ]

    @precondition(lambda self: self.world.packets)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """In any order, except that one worker's tokens reach the router in theirs."""
        packet = self.world.packets[data.draw(st.integers(0, len(self.world.packets) - 1))]
        if isinstance(packet.message, TokenBatch):
            packet = next(one for one in self.world.packets if isinstance(one.message, TokenBatch))
        self.world.deliver(packet)

    @precondition(lambda self: self.world.packets)
    @rule(count=st.integers(1, 6))
    def deliver_oldest(self, count: int) -> None:
        for packet in self.world.packets[:count]:
            self.world.deliver(packet)

    def _repairable(self) -> list[int]:
        return [
            index for index, packet in enumerate(self.world.packets) if isinstance(packet.message, REPAIRABLE)
        ]

    @precondition(lambda self: self._repairable())
    @rule(data=st.data(), double=st.booleans())
    def lose_or_double(self, data: st.DataObject, double: bool) -> None:
        packet = self.world.packets[data.draw(st.sampled_from(self._repairable()))]
        if double:
            self.world.deliver(packet, keep=True)
        elif not isinstance(packet.message, Cancel) or packet.sender.worker_id != "router-0":
            self.world.packets.remove(packet)

    @precondition(lambda self: self.world.writes)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.world.land(data.draw(st.sampled_from(self.world.writes)))

    @precondition(lambda self: self.world.writes)
    @rule(data=st.data(), luck=seldom)
    def fail_write(self, data: st.DataObject, luck: bool) -> None:
        if luck:
            self.world.fail(data.draw(st.sampled_from(self.world.writes)))

    @rule(name=st.sampled_from(["prefill-0", "decode-0"]), count=st.integers(1, 4))
    def step(self, name: str, count: int) -> None:
        worker = self.world.workers[name]
        for _ in range(count):
            if worker.is_alive:
                worker.step()

    @rule(name=st.sampled_from(["prefill-0", "decode-0"]))
    def run_posts(self, name: str) -> None:
        worker = self.world.workers[name]
        if worker.is_alive:
            worker.run_posts()

    @rule(count=st.integers(1, 5), lands=st.booleans())
    def all_get_on(self, count: int, lands: bool) -> None:
        """What mostly happens; the other rules disturb it."""
        for _ in range(count):
            for packet in self.world.packets[:3]:
                self.world.deliver(packet)
            for worker in self.world.workers.values():
                if worker.is_alive:
                    worker.step()
            self._run_posts()
            if lands and self.world.writes:
                self.world.land(self.world.writes[0])
            self.world.check()

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.5, 1.5, 6.0, 6.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        for worker in self.world.workers.values():
            if worker.is_alive:
                worker.role.on_tick()

    @rule()
    def members(self) -> None:
        self.world.update_members()

    @rule(name=st.sampled_from(["prefill-0", "prefill-0", "decode-0"]), luck=seldom)
    def crash(self, name: str, luck: bool) -> None:
        if luck and self.world.workers[name].is_alive:
            self.world.crash(name)

    @precondition(lambda self: any(not worker.is_alive for worker in self.world.workers.values()))
    @rule()
    def restart(self) -> None:
        for name, worker in list(self.world.workers.items()):
            if not worker.is_alive:
                self.world.start(name, worker.role_name)

    @invariant()
    def safe(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """The network is quiet, time passes, everybody lives: all must come to an end."""
        self.restart()
        for _ in range(400):
            self.world.update_members()
            self._run_posts()
            for packet in list(self.world.packets):
                self.world.deliver(packet)
            for write in list(self.world.writes):
                self.world.land(write)
            for worker in self.world.workers.values():
                worker.step()
            self._run_posts()
            self.time_passes(0.5)
            self.world.check()
            if self._is_quiet():
                break
        for name, answer in self.world.answers.items():
            if answer.is_cancelled:
                continue
            assert len(answer.endings) == 1, f"{name} ended {answer.endings}"
            wanted = expected(tuple(answer.generate.spec.prompt_token_ids), self.samplings[name])
            assert answer.tokens == wanted[: len(answer.tokens)], name
            if answer.endings[0] in ("stop", "length"):
                assert answer.tokens == wanted, name
        for worker in self.world.workers.values():
            load = worker.engine.load()
            assert load.kv.blocks_free == load.kv.blocks_total, (worker.peer, load)
            assert worker.role.num_active == 0, worker.peer
            assert len(worker.role.ledger) == 0

    def _is_quiet(self) -> bool:
        return not self.world.packets and all(
            worker.role.num_active == 0 and not worker.loop.commands and not worker.engine.has_work()
            for worker in self.world.workers.values()
        )


HandoffMachine.TestCase.settings = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target),  # shrinking takes minutes
)
TestHandoffMachine = HandoffMachine.TestCase
