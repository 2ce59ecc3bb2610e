"""What a worker of two roles gives to which, and what a change of its role does. On a network in memory."""

from __future__ import annotations

import pytest
from msgspec import structs

from cluster.malformed import MalformedMessage
from cluster.members import Peer, Role
from cluster.messages import CancelPrefill, Generate, HandoffFenced, SetRole, TokenBatch
from cluster.sequence_spec import RequestKey, SequenceSpec
from tests.engine.prefix_runner import greedy
from tests.simulation.under_way import Packet
from tests.simulation.world import Worker, World

ROUTER = Peer("router-0", 1)
KEY = RequestKey("r", 1)
GENERATE = Generate(key=KEY, spec=SequenceSpec(prompt_token_ids=[1, 2, 3], sampling=greedy(3)))


@pytest.fixture
def worker() -> Worker:
    return World.connected().workers["decode-0"]


def arrive(worker: Worker, message: object, sender: Peer = ROUTER) -> list[object]:
    """Let a message come and everything follow from it; what the worker answers."""
    worker.receive(Packet(sender, worker.peer.worker_id, message))  # type: ignore[arg-type]
    for _ in range(12):
        worker.step()
        worker.run_posts()
    answers = [packet.message for packet in worker.world.packets if packet.sender == worker.peer]
    worker.world.packets.clear()
    return answers  # type: ignore[return-value]


def endings(answers: list[object]) -> list[tuple[str | None, str]]:
    outputs = [one for batch in answers if isinstance(batch, TokenBatch) for one in batch.outputs]
    return [(one.finish_reason, one.error.code if one.error else "") for one in outputs if one.finish_reason]


@pytest.mark.parametrize(
    ("role", "ending"),
    [("decode", ("length", "")), ("both", ("length", "")), ("prefill", ("error", "draining"))],
)
def test_requests_are_taken_in_the_roles_that_say_so(
    worker: Worker, role: Role, ending: tuple[str, str]
) -> None:
    worker.hosted.set_role(role)
    assert endings(arrive(worker, GENERATE)) == [ending]


def test_an_order_given_twice_changes_the_role_once_and_what_runs_is_finished(worker: Worker) -> None:
    for message in (GENERATE, SetRole(role="prefill")):
        worker.receive(Packet(ROUTER, "decode-0", message))
    assert worker.hosted.num_active == 1
    assert endings(arrive(worker, SetRole(role="prefill"))) == [("length", "")]
    assert (worker.record.role, worker.record.role_epoch) == ("prefill", 1)
    assert worker.hosted.num_active == 0


def test_the_load_says_what_is_left_of_the_old_role(worker: Worker) -> None:
    def report() -> tuple[int, int]:
        report = worker.hosted.report(worker.engine.load(), "ready")
        return report.role_epoch, report.num_leaving

    worker.receive(Packet(ROUTER, "decode-0", GENERATE))
    assert report() == (0, 0)
    worker.hosted.set_role("prefill")
    assert report() == (1, 1)
    arrive(worker, structs.replace(GENERATE, key=RequestKey("other", 1)))
    assert report() == (1, 0)


def test_a_worker_that_drains_takes_nothing_whatever_role_it_is_given(worker: Worker) -> None:
    worker.hosted.drain()
    worker.hosted.set_role("both")
    assert worker.record.role_epoch == 0
    assert endings(arrive(worker, GENERATE)) == [("error", "draining")]


def test_the_prefill_role_gets_what_is_its_own(worker: Worker) -> None:
    """On a worker that advertises the other one."""
    peer = worker.world.workers["prefill-0"].peer
    cancel = CancelPrefill(key=KEY, reason="client")
    assert arrive(worker, cancel, sender=peer) == [HandoffFenced(key=KEY)]


@pytest.mark.parametrize(("kind", "answer"), [("prefill", HandoffFenced), ("generate", TokenBatch)])
def test_what_cannot_be_read_is_answered_by_the_role_it_was_for(
    worker: Worker, kind: str, answer: type
) -> None:
    worker.server.receive_malformed(
        MalformedMessage(sender="somebody", incarnation=1, kind=kind, key=KEY, reason="odd")
    )
    (packet,) = worker.world.packets
    assert isinstance(packet.message, answer)
