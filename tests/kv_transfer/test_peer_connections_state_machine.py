"""Workers start, register, freeze, die and fail in any order: the right ones end up connected."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cluster.members import Peer, WorkerRecord
from tests.kv_transfer.peers import Harness, Worker

IDS = ("d0", "d1", "d2")


class PeerConnectionsMachine(RuleBasedStateMachine):
    """Three decode workers that start, register, freeze, die and fail in any order.

    A process without a lease is frozen, or cut off from the registry: it exists, and may come back. Of one id
    there may be several, of which the registry lists the newest.
    """

    ids = st.sampled_from(IDS)

    @initialize()
    def start(self) -> None:
        self.harness = Harness()
        self.harness.checks_wait = True
        self.processes: dict[Peer, Worker] = {}  # that exist
        self.registered: dict[str, WorkerRecord] = {}
        self.incarnations = dict.fromkeys(IDS, 0)
        self.open: set[Peer] = set()  # connected and not lost since
        self.num_seen = 0

    @rule(worker_id=ids)
    def worker_starts_and_registers(self, worker_id: str) -> None:
        self.incarnations[worker_id] += 1
        worker = self.harness.start(worker_id, incarnation=self.incarnations[worker_id])
        self.processes[worker.peer] = worker
        self.harness.alive.add(worker.peer)
        self.registered[worker_id] = worker.record

    @rule(worker_id=ids, newest=st.booleans())
    def worker_dies(self, worker_id: str, newest: bool) -> None:
        """The newest process of that id, or the oldest."""
        peers = sorted((peer for peer in self.processes if peer.worker_id == worker_id), key=_incarnation)
        if peers:
            self._die(peers[-1 if newest else 0])

    @rule(worker_id=ids)
    def lease_ends(self, worker_id: str) -> None:
        self.registered.pop(worker_id, None)

    @rule(worker_id=ids)
    def lease_is_renewed(self, worker_id: str) -> None:
        worker = self.processes.get(Peer(worker_id, self.incarnations[worker_id]))
        if worker is not None:
            self.registered[worker_id] = worker.record

    @rule()
    def update(self) -> None:
        self.harness.connections.update(list(self.registered.values()))

    @rule()
    def checks_end(self) -> None:
        self.harness.answer_checks()

    @rule()
    def completion(self) -> None:
        if not self.harness.is_quiet():
            self.harness.pump()

    @rule(worker_id=ids)
    def write(self, worker_id: str) -> None:
        peer = self.harness.connections.get(worker_id)
        if peer is not None and not self.harness.own.transport.writes_reach(peer):
            self.harness.connections.mark_failed(peer)

    @rule()
    def everything_settles(self) -> None:
        """Whoever has no lease dies, too."""
        for worker in list(self.processes.values()):
            if self.registered.get(worker.record.id) != worker.record:
                self._die(worker.peer)
        for _ in range(3):  # lose the old one, connect, and once more for a completion that was under way
            self.update()
            self._drain()
        for worker_id in IDS:
            wanted = self.registered.get(worker_id)
            connected = self.harness.connections.get(worker_id)
            if wanted is None:
                assert connected is None
            elif Peer(wanted.id, wanted.incarnation) in self.processes:
                assert connected == Peer(wanted.id, wanted.incarnation)
        assert self.harness.connections.is_settled
        assert {peer.worker_id for peer in self.harness.agents} <= set(self.registered)

    def _die(self, peer: Peer) -> None:
        self.processes.pop(peer).transport.close()
        self.harness.alive.discard(peer)

    def _drain(self) -> None:
        while True:
            self.harness.answer_checks()
            if self.harness.is_quiet():
                return
            self.harness.pump()

    @invariant()
    def events_make_sense(self) -> None:
        for event, peer in self.harness.events[self.num_seen :]:
            if event == "connected":
                others = {other for other in self.open if other.worker_id == peer.worker_id} - {peer}
                assert not others, f"{others} were not lost before {peer} was connected"
                self.open.add(peer)
            else:
                assert peer not in self.harness.alive, "it may still write"
                self.open.discard(peer)
        self.num_seen = len(self.harness.events)
        for worker_id in IDS:
            connected = self.harness.connections.get(worker_id)
            assert connected is None or connected in self.open, "it was never announced"


def _incarnation(peer: Peer) -> int:
    return peer.incarnation


def test_any_order_of_events() -> None:
    run_state_machine_as_test(
        PeerConnectionsMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            phases=[phase for phase in Phase if phase is not Phase.explain],
        ),
    )
