"""Workers start, register, vanish and fail in any order: the right ones end up connected."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cluster.members import WorkerRecord
from kv_transfer.transport import Peer, TransferError
from tests.kv_transfer.peers import Harness, Worker


class PeerConnectionsMachine(RuleBasedStateMachine):
    """Three decode workers that start, register, vanish and fail in any order."""

    ids = st.sampled_from(["d0", "d1", "d2"])

    @initialize()
    def start(self) -> None:
        self.harness = Harness()
        self.running: dict[str, Worker] = {}
        self.registered: dict[str, WorkerRecord] = {}
        self.incarnations = dict.fromkeys(["d0", "d1", "d2"], 0)
        self.open: set[Peer] = set()  # connected and not lost since
        self.num_seen = 0

    @rule(worker_id=ids)
    def worker_starts_and_registers(self, worker_id: str) -> None:
        self.incarnations[worker_id] += 1
        self.running[worker_id] = self.harness.start(worker_id, incarnation=self.incarnations[worker_id])
        self.registered[worker_id] = self.running[worker_id].record

    @rule(worker_id=ids)
    def worker_dies(self, worker_id: str) -> None:
        if worker_id in self.running:
            self.running.pop(worker_id).transport.close()

    @rule(worker_id=ids)
    def lease_ends(self, worker_id: str) -> None:
        self.registered.pop(worker_id, None)

    @rule(worker_id=ids)
    def worker_freezes(self, worker_id: str) -> None:
        """It loses its lease, and nobody can know whether it will go on."""
        if worker_id in self.running:
            self.harness.frozen.add(self.running[worker_id].peer)
            self.registered.pop(worker_id, None)

    @rule()
    def frozen_workers_die(self) -> None:
        self.harness.frozen.clear()

    @rule(worker_id=ids)
    def lease_is_renewed(self, worker_id: str) -> None:
        if worker_id in self.running:
            self.registered[worker_id] = self.running[worker_id].record

    @rule()
    def update(self) -> None:
        self.harness.connections.update(list(self.registered.values()))

    @rule()
    def completion(self) -> None:
        if not self.harness.is_quiet():
            self.harness.pump()

    @rule(worker_id=ids)
    def write(self, worker_id: str) -> None:
        peer = self.harness.connections.get(worker_id)
        if peer is not None:
            try:
                self.harness.own.transport.write_blocks(peer, [1], [1]).result(timeout=20)
            except TransferError:
                self.harness.connections.mark_failed(peer)

    @rule()
    def everything_settles(self) -> None:
        self.harness.frozen.clear()
        for _ in range(3):  # lose the old one, connect, and once more for a completion that was under way
            self.update()
            self._drain()
        for worker_id in self.incarnations:
            wanted = self.registered.get(worker_id)
            connected = self.harness.connections.get(worker_id)
            worker = self.running.get(worker_id)
            if wanted is None:
                assert connected is None
            elif worker is not None and worker.record == wanted:
                assert connected == worker.peer
        assert self.harness.connections.is_settled
        assert {peer.worker_id for peer in self.harness.agents} <= set(self.registered)

    def _drain(self) -> None:
        """Run all completions: whatever was submitted before this no-op has been posted when it is done."""
        self.harness.own.transport.remove_peer(Peer("nobody", 0)).result(timeout=20)
        while not self.harness.is_quiet():
            self.harness.pump()

    @invariant()
    def events_make_sense(self) -> None:
        for event, peer in self.harness.events[self.num_seen :]:
            if event == "connected":
                others = {other for other in self.open if other.worker_id == peer.worker_id} - {peer}
                assert not others, f"{others} were not lost before {peer} was connected"
                self.open.add(peer)
            else:
                assert peer not in self.harness.frozen, "it may still write"
                self.open.discard(peer)
        self.num_seen = len(self.harness.events)
        for worker_id in self.incarnations:
            connected = self.harness.connections.get(worker_id)
            assert connected is None or connected in self.open, "it was never announced"

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()


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
