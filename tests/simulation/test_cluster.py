"""Random walks of a whole cluster: nothing leaks, nothing is reused early, nothing hangs, no answer is wrong.

The walks are shown to see what they look for by breaking the code on purpose.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from cluster.sequence_spec import RequestKey
from decode_worker import decode_worker as decode_module
from decode_worker.remote_prefills import PrefillFailure, RemotePrefills
from kv_transfer.peer_connections import PeerConnections
from prefill_worker.prefill_worker import PrefillWorker
from router.dispatch.dispatcher import Dispatcher
from tests.simulation import cluster_world
from tests.simulation.walk import Walk

NUM_STEPS = 300
HAPPENED = (
    "became both",
    "became decode",
    "became prefill",
    "checksum mismatches",
    "connections broken",
    "damaged writes",
    "decode crashes",
    "decode frozen and continued",
    "duplicates",
    "handoffs: completed",
    "handoffs: fenced",
    "handoffs: writer_gone",
    "late writes of frozen or dead writers",
    "preemptions",
    "prefill crashes",
    "prefill frozen and continued",
    "requests done after further attempts",
    "requests: cancelled",
    "requests: connection error",
    "requests: length",
    "requests: stop",
    "requests: timeout",
    "router crashes",
    "router frozen and continued",
    "workers drained",
)

# Which of the two is met first depends on who gets the blocks next: a new handoff, or nobody yet.
STILL_WRITABLE = "are free, but still written|its writer may still write it"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A walk logs thousands of warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_walks_end_well_and_meet_everything() -> None:
    counts: Counter[str] = Counter()
    for seed in range(40):
        counts += Walk(seed).run(NUM_STEPS)
    assert [what for what in HAPPENED if not counts[what]] == []


def find_violation(what: str) -> None:
    """Walk until something that must hold does not: ``what`` is in the message."""
    for seed in range(80):
        try:
            Walk(seed).run(NUM_STEPS)
        except Exception as violation:
            if re.search(what, str(violation)):
                return
            raise
    pytest.fail("nothing was noticed")


def test_blocks_freed_although_their_writer_may_still_write_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancel = RemotePrefills.cancel

    def without_quarantine(self: RemotePrefills, key: RequestKey, reason: str) -> bool:
        cancel(self, key, reason)
        return False

    monkeypatch.setattr(RemotePrefills, "cancel", without_quarantine)
    find_violation("are free, but still written")


def test_a_frozen_writer_taken_for_dead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_at_once(self: PeerConnections, connection: object) -> None:
        if connection.state != "leaving":  # type: ignore[attr-defined]
            self._leave(connection)  # type: ignore[arg-type]

    monkeypatch.setattr(PeerConnections, "_doubt", leave_at_once)
    monkeypatch.setattr(cluster_world, "REMOVAL_ENDS_WRITES", False)
    find_violation("are free, but still written|writes blocks")


def test_failed_prefills_whose_blocks_are_not_quarantined_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def always_safe(**fields: object) -> PrefillFailure:
        return PrefillFailure(**{**fields, "may_still_write": False})  # type: ignore[arg-type]

    monkeypatch.setattr("decode_worker.remote_prefills.PrefillFailure", always_safe)
    find_violation(STILL_WRITABLE)


def test_a_seal_before_the_data_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = PrefillWorker._settle

    def hasty(self: PrefillWorker, request: object) -> None:
        in_flight, request.operations_in_flight = request.operations_in_flight, 0  # type: ignore[attr-defined]
        settle(self, request)  # type: ignore[arg-type]
        request.operations_in_flight = in_flight  # type: ignore[attr-defined]

    monkeypatch.setattr(PrefillWorker, "_settle", hasty)
    find_violation("event seal is not legal")


def test_damage_that_is_not_looked_for_makes_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.world.VERIFY", "off")
    find_violation(", not ")


def test_tokens_of_an_old_attempt_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_any(self: Dispatcher, worker: str, batch: object) -> None:
        for output in batch.outputs:  # type: ignore[attr-defined]
            entry = self.in_flight.get(output.key.request_id)
            if entry is not None:
                self._take(entry, output)

    monkeypatch.setattr(Dispatcher, "on_tokens", take_any)
    find_violation(r"\], not \[")


def test_a_request_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module.DecodeWorker, "_prefill_failed", lambda self, failure: None)
    find_violation(STILL_WRITABLE)
