"""A random walk through all that can happen in a ``ClusterWorld``, and the end that it must come to."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import get_args

from cluster.members import Role
from cluster.messages import CancelPrefill, HandoffFenced, HandoffProgress, Prefill, SetRole
from cluster.sampling_params import SamplingParams
from router.cluster_view import WorkerUnreachableError
from router.dispatch.dispatcher import MAX_ATTEMPTS
from router.dispatch.request_queue import RECOVERY_WAIT_S
from tests.engine.prefix_runner import greedy, oracle
from tests.simulation.cluster_world import WORKERS, ClusterWorker, ClusterWorld
from tests.simulation.simulated_router import Client
from tests.simulation.under_way import Write

SHARED = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11]
SAMPLINGS = [
    greedy(1),
    greedy(5),
    greedy(12, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=5, temperature=1.0),
    SamplingParams(max_tokens=8, seed=6, temperature=0.8, presence_penalty=1.0),
]
DONE = ("stop", "length")
DUPLICABLE = (Prefill, CancelPrefill, HandoffFenced, HandoffProgress)
TICK_S = 0.25
LONGEST_GAP_S = 1.0  # between two ticks of anybody who runs


@functools.cache
def expected(prompt: tuple[int, ...], sampling: int) -> list[int]:
    """The undisturbed answer."""
    return oracle(prompt, SAMPLINGS[sampling])


class Walk:
    """One random walk. ``run`` raises AssertionError where something that must hold does not."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world = ClusterWorld(rng)
        self.samplings: dict[str, int] = {}
        self.num_steps = 0
        self._actions: list[tuple[int, Callable[[], None]]] = [
            (9, self.get_on),
            (5, self.new_request),
            (9, self.deliver),
            (5, self.step_somebody),
            (5, self.land),
            (4, self.time_passes),
            (2, self.members),
            (1, self.cancel),
            (1, self.duplicate),
            (1, self.break_connection),
            (1, self.fail_write),
            (1, self.freeze_or_thaw),
            (1, self.crash),
            (1, self.router_fault),
            (1, self.damage),
            (1, self.drain),
            (1, self.flip),
            (4, self.repair),
        ]
        self._weights = [weight for weight, _ in self._actions]

    def run(self, num_steps: int) -> Counter[str]:
        """Walk, come to an end, and return what was counted on the way."""
        for _ in range(num_steps):
            ((_, action),) = self.rng.choices(self._actions, self._weights)
            action()
            self.num_steps += 1
            self.world.read_answers()
            self.world.check()
        self.come_to_an_end()
        for outcome, count in self.world.outcomes().items():
            assert outcome is not None
            self.world.counts[f"handoffs: {outcome.value}"] += count
        for worker in self.world.workers.values():
            self.world.counts["checksum mismatches"] += len(worker.events.corrupted)
            self.world.counts["preemptions"] += worker.engine.load().queue.preemptions_total
        return self.world.counts

    # --- what mostly happens ---

    def get_on(self) -> None:
        """All processes work for a while."""
        for _ in range(self.rng.randint(1, 6)):
            for packet in self.world.send_order():
                if packet in self.world.packets:
                    self.world.deliver(packet)
            for worker in self.world.cluster_workers():
                worker.step()
                worker.run_posts()
            running = self._writes_of_running_workers()
            if running and self.rng.random() < 0.4:
                self.world.land(running[0])
            self.world.read_answers()
            self.world.check()

    def new_request(self) -> None:
        if not self.world.router_runs or sum(not one.ending for one in self.world.clients.values()) > 6:
            return
        name, sampling = f"r{len(self.samplings)}", self.rng.randrange(len(SAMPLINGS))
        self.samplings[name] = sampling
        tail = [self.rng.randrange(4) for _ in range(self.rng.randint(1, 12))]
        self.world.request(
            Client(
                name=name,
                prompt=SHARED[: self.rng.randint(0, len(SHARED))] + tail,
                sampling=SAMPLINGS[sampling],
                timeout_s=self.rng.choice([5.0, 40.0, 300.0]),
                started_at=self.world.clock.unix(),
            )
        )

    def deliver(self) -> None:
        packets = self.world.send_order()
        if packets:
            self.world.deliver(self.rng.choice(packets))

    def step_somebody(self) -> None:
        workers = self.world.cluster_workers()
        if workers:
            worker = self.rng.choice(workers)
            worker.step()
            if self.rng.random() < 0.7:
                worker.run_posts()

    def _writes_of_running_workers(self) -> list[Write]:
        running = self.world.cluster_workers()
        return [write for write in self.world.writes if write.source in running]

    def land(self) -> None:
        writes = self._writes_of_running_workers()
        if self.rng.random() < 0.1:  # of dead and of frozen workers: late, if ever
            writes = self.world.writes + self.world.orphans
        if writes:
            self.world.land(self.rng.choice(writes))

    def time_passes(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 8, 24])):
            self.tick(TICK_S)

    def tick(self, seconds: float) -> None:
        """Everybody who runs does what it does each interval."""
        self.world.clock.advance(seconds)
        if self.world.router_runs:
            assert self.world.router is not None
            self.world.router.fire_timers()
            self.world.router.view.heartbeat()
        for worker in self.world.cluster_workers():
            worker.tick()
            worker.run_posts()

    def members(self) -> None:
        self.world.tell_members()

    # --- what disturbs it ---

    def cancel(self) -> None:
        running = [one for one in self.world.clients.values() if not one.ending and one.generation]
        if running and self.world.router_runs:
            self.world.cancel_client(self.rng.choice(running))

    def duplicate(self) -> None:
        packets = [
            packet
            for packet in self.world.send_order()
            if isinstance(packet.message, DUPLICABLE) or packet.is_notification
        ]
        if packets:
            self.world.deliver(self.rng.choice(packets), keep=True)
            self.world.count("duplicates")

    def break_connection(self) -> None:
        decode = self.rng.choice(["decode-0", "decode-1"])
        other = self.rng.choice(["router-0", "prefill-0", "prefill-1"])
        frozen = [self.world.workers[name] for name in (decode, other) if name in self.world.workers]
        is_router_ready = other != "router-0" or self.world.router_runs
        if is_router_ready and all(worker in self.world.cluster_workers() for worker in frozen):
            self.world.break_connection(decode, other)

    def fail_write(self) -> None:
        if self.world.writes and self.rng.random() < 0.3:
            self.world.fail(self.rng.choice(self.world.writes))

    def freeze_or_thaw(self) -> None:
        worker = self.world.workers[self.rng.choice(list(WORKERS))]
        assert isinstance(worker, ClusterWorker)
        if self.world.writes and self.rng.random() < 0.5:  # in the middle of something
            worker = self.rng.choice(self.world.writes).source
            assert isinstance(worker, ClusterWorker)
        if not worker.is_alive:
            return
        if worker.frozen_since is not None:
            self.thaw(worker)
        elif self.rng.random() < 0.4:
            worker.frozen_since = self.world.clock.monotonic()

    def thaw(self, worker: ClusterWorker) -> None:
        worker.frozen_since = None
        self.world.count(f"{worker.role_name} frozen and continued")
        worker.run_posts()

    def crash(self) -> None:
        name = self.rng.choice(list(WORKERS))
        if self.world.writes and self.rng.random() < 0.5:
            name = self.rng.choice(self.world.writes).source.peer.worker_id
        if self.world.workers[name].is_alive and self.rng.random() < 0.3:
            self.world.crash(name)

    def repair(self) -> None:
        """One thing that is broken gets well."""
        world = self.world
        if world.router is None:
            world.start_router()
            return
        if world.router.frozen_since is not None:
            world.thaw_router()
            return
        for name in self.rng.sample(list(WORKERS), len(WORKERS)):
            worker = world.workers[name]
            assert isinstance(worker, ClusterWorker)
            if not worker.is_alive:
                self.restart(name)
                return
            if worker.frozen_since is not None and self.rng.random() < 0.2:
                self.thaw(worker)
                return

    def restart(self, name: str) -> None:
        gone = self.world.workers[name]
        for outcome, count in Counter(handoff.outcome for handoff in gone.events.handoffs).items():
            assert outcome is not None
            self.world.counts[f"handoffs: {outcome.value}"] += count
        self.world.counts["checksum mismatches"] += len(gone.events.corrupted)
        self.world.counts["preemptions"] += gone.engine.load().queue.preemptions_total
        self.world.start(name, WORKERS[name])

    def router_fault(self) -> None:
        world = self.world
        if not world.router_runs:
            return
        assert world.router is not None
        if self.rng.random() < 0.2:
            world.crash_router()
        elif self.rng.random() < 0.3:
            world.router.frozen_since = world.clock.monotonic()

    def damage(self) -> None:
        if self.world.writes and self.rng.random() < 0.5:
            self.world.land(self.rng.choice(self.world.writes), damaged=True)

    def drain(self) -> None:
        """A worker drains, gives up what it has, and ends; another life follows."""
        worker = self.rng.choice(self.world.cluster_workers() or [None])
        if worker is None or self.rng.random() > 0.3:
            return
        assert isinstance(worker, ClusterWorker)
        worker.state = "draining"
        worker.hosted.drain()
        worker.report()
        for _ in range(self.rng.randrange(6)):
            self.get_on()
        if worker not in self.world.cluster_workers():
            return
        worker.hosted.abandon("draining")
        for _ in range(self.rng.randrange(3)):
            self.get_on()
        self.world.count("workers drained")
        self.world.crash(worker.peer.worker_id)

    def flip(self) -> None:
        """An operator has the router change a worker's role."""
        if self.world.router_runs and self.rng.random() < 0.5:
            assert self.world.router is not None
            role = self.rng.choice(get_args(Role))
            with contextlib.suppress(WorkerUnreachableError):
                self.world.router.view.send(self.rng.choice(list(WORKERS)), SetRole(role=role))

    # --- the end ---

    def come_to_an_end(self) -> None:
        """Everybody lives, the network works, time passes: all must end, and every block come back."""
        world = self.world
        if world.router is None:
            world.start_router()
        elif world.router.frozen_since is not None:
            world.thaw_router()
        for name in WORKERS:
            worker = world.workers[name]
            assert isinstance(worker, ClusterWorker)
            if worker.frozen_since is not None:
                self.thaw(worker)
            if worker.state == "draining" and worker.is_alive:
                world.crash(name)
            if not world.workers[name].is_alive:
                self.restart(name)
        for name, role in WORKERS.items():
            self.world.workers[name].hosted.set_role(role)
        for _ in range(3000):
            world.tell_members(everybody=True)
            self.tick(TICK_S)
            for write in [*world.writes, *world.orphans]:
                if write in world.writes or write in world.orphans:
                    world.land(write)
            self.get_on()
            if self._is_quiet():
                break
        self._check_end()

    def _is_quiet(self) -> bool:
        return all(client.ending for client in self.world.clients.values()) and all(
            worker.hosted.num_active == 0
            and not worker.loop.commands
            and worker.engine.load().kv.blocks_free == worker.engine.load().kv.blocks_total
            for worker in self.world.workers.values()
        )

    def _check_end(self) -> None:
        for worker in self.world.workers.values():
            assert isinstance(worker, ClusterWorker)
            load = worker.engine.load()
            assert load.kv.blocks_free == load.kv.blocks_total, (worker.peer, load)
            assert worker.hosted.num_active == 0, worker.peer
            for role in (worker.hosted.prefill, worker.hosted.decode):
                assert len(role.ledger) == 0, worker.peer
            assert not worker.hosted.decode._remote_prefills._wanted
        for client in self.world.clients.values():
            self._check_client(client)

    def _check_client(self, client: Client) -> None:
        assert client.ending, f"{client.name} never ended"
        wanted = expected(tuple(client.prompt), self.samplings[client.name])
        assert client.tokens == wanted[: len(client.tokens)], f"{client.name}: {client.tokens}, not {wanted}"
        if client.ending in DONE:
            assert client.tokens == wanted, f"{client.name} ended early"
        elif client.ending in ("timeout", "deadline_exceeded"):
            assert client.ended_at - client.started_at >= client.timeout_s, client
        elif client.ending not in ("cancelled", "connection error", "no worker"):
            used_up = client.num_attempts >= MAX_ATTEMPTS or client.lost_for_s >= RECOVERY_WAIT_S
            assert used_up, f"{client.name} ended with {client.ending} after {client.num_attempts} attempts"
