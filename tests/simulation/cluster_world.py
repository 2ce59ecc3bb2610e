"""A whole cluster in one thread: a router's real dispatcher and view, and the real roles of four workers.

Built on ``World``: nothing happens by itself. Added are the router, which may crash, freeze and come back;
workers that freeze; connections that break and lose what is under way; writes that land late, after their
writer froze or died; blocks that arrive damaged; draining; and member lists that each process sees in its own
time.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from cluster.load import WorkerState
from cluster.members import Members, Peer, Role, WorkerRecord
from cluster.sequence_spec import SequenceSpec
from kv_transfer.handoff import HandoffOutcome
from kv_transfer.transport import TransferStats
from router.dispatch.in_flight import SequenceRequest
from router.policy.plan import NoWorkerError
from tests.simulation.simulated_router import ROUTER, Client, Router
from tests.simulation.under_way import Packet, Write
from tests.simulation.world import LEASE_S, MAX_STALL_S, Worker, World

WORKERS: dict[str, Role] = {
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}
REMOVAL_ENDS_WRITES = True  # of a live writer: what RDMA promises, and shared memory does not


@dataclass(eq=False)
class ClusterWorker(Worker):
    """A worker that reports its load, and may freeze."""

    frozen_since: float | None = None
    state: WorkerState = "ready"

    def report(self) -> None:
        self.hosted.report(self.engine.load(), self.state)

    def tick(self) -> None:
        self.hosted.on_tick()
        self.report()

    def remove_peer(self, peer: Peer) -> Future[None]:
        """What a dead writer had sent has landed when its agent is removed."""
        assert isinstance(self.world, ClusterWorld)
        for write in [
            one for one in self.world.orphans if (one.target, one.source.peer) == (self.peer, peer)
        ]:
            self.world.land(write)
        return super().remove_peer(peer)


class ClusterWorld(World):
    """One router, two prefill and two decode workers, and everything that can happen to them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.clients: dict[str, Client] = {}
        self.orphans: list[Write] = []  # writes of dead writers, still on the wire
        self.router: Router | None = None
        super().__init__()
        for name, role in WORKERS.items():
            if name not in self.workers:
                self.start(name, role)
        self.start_router()
        self.settle()

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def start(self, name: str, role: Role) -> None:
        self._lives += 1
        self.workers[name] = ClusterWorker(self, Peer(name, self._lives), role)

    def role_changed(self, record: WorkerRecord) -> None:
        self.count(f"became {record.role}")

    def cluster_workers(self) -> list[ClusterWorker]:
        """Those that run now: alive and not frozen."""
        return [
            worker
            for worker in self.workers.values()
            if isinstance(worker, ClusterWorker) and worker.is_alive and worker.frozen_since is None
        ]

    def settle(self) -> None:
        """Everybody knows everybody."""
        for _ in range(4):
            self.tell_members(everybody=True)
            if self.router is not None:
                self.router.view.heartbeat()
            for worker in self.cluster_workers():
                worker.run_posts()
                worker.tick()
            for packet in list(self.packets):
                self.deliver(packet)

    # --- members ---

    def registered(self) -> list[WorkerRecord]:
        """Who has a lease now: a process frozen for less than its lease still has one."""
        now = self.clock.monotonic()
        return [
            worker.record
            for worker in self.workers.values()
            if isinstance(worker, ClusterWorker)
            and worker.is_alive
            and (worker.frozen_since is None or now - worker.frozen_since < LEASE_S)
        ]

    def tell_members(self, *, everybody: bool = False) -> None:
        """Some or all processes read the registry."""
        records = self.registered()
        for worker in self.cluster_workers():
            if everybody or self.rng.random() < 0.5:
                worker.hosted.on_members(Members(workers=tuple(records)))
        if self.router_runs and (everybody or self.rng.random() < 0.5):
            self.router.view.update(Members(workers=tuple(records)))  # type: ignore[union-attr]

    # --- the router ---

    @property
    def router_runs(self) -> bool:
        return self.router is not None and self.router.frozen_since is None

    def start_router(self) -> None:
        self._lives += 1
        self.router = Router(self, self._lives)

    def crash_router(self) -> None:
        """Its clients see their connection break; what it had sent may still arrive."""
        self.router = None
        self.count("router crashes")
        for client in self.clients.values():
            if not client.ending:
                self.end(client, "connection error")

    def thaw_router(self) -> None:
        assert self.router is not None
        assert self.router.frozen_since is not None
        frozen_s = self.clock.monotonic() - self.router.frozen_since
        self.router.frozen_since = None
        self.count("router frozen and continued")
        if frozen_s > MAX_STALL_S:
            self.router.view.suspect_all()
        self.router.fire_timers()

    def request(self, client: Client) -> None:
        assert self.router is not None
        self.clients[client.name] = client
        request = SequenceRequest(
            request_id=client.name,
            spec=SequenceSpec(prompt_token_ids=client.prompt, sampling=client.sampling),
            model="m",
        )
        try:
            client.generation = self.router.queue.start([request], client.timeout_s * 1000)
        except NoWorkerError:
            self.end(client, "no worker")

    def cancel_client(self, client: Client) -> None:
        assert self.router is not None
        assert client.generation is not None
        self.router.queue.close(client.generation, "client")
        self.end(client, "cancelled")

    def read_answers(self) -> None:
        """What the API layer does: take what has come, and end what has ended."""
        for client in self.clients.values():
            if client.ending or client.generation is None:
                continue
            pending, client.generation._pending = client.generation._pending, []
            for _, output in pending:
                client.tokens += output.token_ids
                if output.error is None and output.finish_reason is None:
                    continue
                entry = client.generation.entries[0]
                client.num_attempts = entry.attempt + 1
                client.lost_for_s = self.clock.unix() - entry.lost_at if entry.lost_at else 0.0
                assert self.router is not None
                self.router.queue.close(client.generation, "done")
                self.end(client, output.error.code if output.error else str(output.finish_reason))
                break

    def end(self, client: Client, ending: str) -> None:
        client.ending, client.ended_at = ending, self.clock.unix()
        self.count(f"requests: {ending}")
        if client.num_attempts > 1 and ending in ("stop", "length"):
            self.count("requests done after further attempts")

    # --- the network ---

    def send_order(self) -> list[Packet]:
        """The packets that may arrive next: the oldest of each connection and direction."""
        first: dict[tuple[Peer, str, bool], Packet] = {}
        for packet in self.packets:
            if self._can_receive(packet.receiver):
                first.setdefault((packet.sender, packet.receiver, packet.is_notification), packet)
        return list(first.values())

    def _can_receive(self, name: str) -> bool:
        if name == ROUTER:
            return self.router is None or self.router.frozen_since is None
        worker = self.workers[name]
        return not worker.is_alive or getattr(worker, "frozen_since", None) is None

    def deliver(self, packet: Packet, *, keep: bool = False) -> None:
        if not keep:
            self.packets.remove(packet)
        if packet.receiver == ROUTER:
            connection = self.router.connections.get(packet.sender) if self.router else None
            if connection is not None:
                connection.receive(packet)
            return
        worker = self.workers[packet.receiver]
        if not worker.is_alive:
            return
        assert isinstance(worker, ClusterWorker)
        worker.receive(packet)
        worker.run_posts()

    def break_connection(self, one: str, other: str) -> None:
        """What is under way on it is lost, and the side that connected notices."""
        pair = {one, other}
        self.packets = [
            packet
            for packet in self.packets
            if packet.is_notification or {packet.sender.worker_id, packet.receiver} != pair
        ]
        self.count("connections broken")
        for name in pair:
            worker = self.workers.get(name)
            if ROUTER in pair and name != ROUTER and self.router is not None:
                for peer, connection in list(self.router.connections.items()):
                    if peer.worker_id == name:
                        connection.on_disconnected()
            elif ROUTER not in pair and worker is not None and worker.is_alive:
                for peer, link in list(worker.connections.items()):
                    if peer.worker_id in pair:
                        link.on_disconnected()
                worker.run_posts()

    def crash(self, name: str) -> None:
        """kill -9. Of what it was writing some is lost, and some is on the wire."""
        worker = self.workers[name]
        worker.is_alive = False
        self.count(f"{worker.role_name} crashes")
        for write in list(self.writes):
            if write.source is worker:
                self.writes.remove(write)
                if self.rng.random() < 0.5 and self.at(write.target) is not None:
                    self.orphans.append(write)
            elif write.target == worker.peer:
                self.fail(write)
        self.orphans = [write for write in self.orphans if write.target != worker.peer]
        if self.rng.random() < 0.7:  # otherwise only the lease tells
            for other in (ROUTER, *WORKERS):
                if other != name:
                    if other == ROUTER and not self.router_runs:
                        continue
                    if other != ROUTER and self.workers[other] not in self.cluster_workers():
                        continue
                    self.break_connection(name, other)

    def land(self, write: Write, *, damaged: bool = False) -> None:
        target = self.at(write.target)
        (self.writes if write in self.writes else self.orphans).remove(write)
        assert isinstance(target, ClusterWorker)
        self.check_write(write)
        values = write.source.runner.kv[torch.tensor(write.local_ids)].clone()
        if damaged:
            values[-1, 0] += 1
            self.count("damaged writes")
        if getattr(write.source, "frozen_since", None) is not None or not write.source.is_alive:
            self.count("late writes of frozen or dead writers")
        target.runner.kv[torch.tensor(write.remote_ids)] = values
        if not write.future.done():
            stats = TransferStats(num_bytes=len(write.local_ids), num_descriptors=1, duration_ms=0.1)
            write.future.set_result(stats)

    def check_write(self, write: Write) -> None:
        """Its blocks still belong to a handoff of that writer, and are promised to nobody else."""
        target = self.at(write.target)
        if not isinstance(target, ClusterWorker):
            return
        self._check_held(target, write.remote_ids, "written")
        writable = {
            block_id
            for handoff in target.hosted.decode.ledger.with_peer(write.source.peer)
            for block_id in handoff.writable_block_ids
        }
        strangers = set(write.remote_ids) - writable
        assert not strangers, f"{write.source.peer} writes blocks {strangers} of {write.target}"

    def check(self) -> None:
        for write in self.orphans:
            self.check_write(write)
        for write in self.writes:
            self.check_write(write)
            self._check_held(write.source, write.local_ids, "read")
        for worker in self.workers.values():
            if worker.is_alive and isinstance(worker, ClusterWorker):
                worker.check_invariants()

    def outcomes(self) -> Counter[HandoffOutcome | None]:
        """How handoffs of the lives that are left have ended."""
        return Counter(
            handoff.outcome for worker in self.workers.values() for handoff in worker.events.handoffs
        )
