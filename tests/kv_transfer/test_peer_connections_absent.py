"""Peers that the registry does not list, but that are not known to be gone: they may still write here."""

from __future__ import annotations

import msgspec
import pytest

from tests.kv_transfer.peers import Harness


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_a_frozen_worker_is_not_lost_until_its_process_is_gone(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.take_events()
    harness.alive.add(d0.peer)
    for _ in range(3):
        harness.update()
    assert harness.connections.get("d0") is None, "nothing new is begun with it"
    assert harness.agents == [d0.peer], "it may still write"
    assert harness.take_events() == []
    assert harness.num_checks == 3, "asked again with each update"
    assert caplog.text.count("is not known to be dead") == 1
    harness.alive.clear()
    harness.update(completions=1)
    assert harness.take_events() == [("lost", d0.peer)]
    assert harness.agents == []
    assert harness.is_quiet()


def test_a_frozen_worker_that_goes_on_was_never_lost(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.alive.add(d0.peer)
    for _ in range(2):
        harness.update()
        harness.update(d0.record)
        assert harness.connections.get("d0") == d0.peer
    assert harness.take_events() == [("connected", d0.peer)] * 3, "what waited for it can begin"
    harness.update(d0.record)
    assert harness.events == []
    assert harness.own.transport.num_peers_added == 1
    assert harness.is_quiet()


def test_a_worker_that_is_back_before_the_check_has_ended_stays(harness: Harness) -> None:
    """The answer is about a worker that is registered by now, and must not end it."""
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.checks_wait = True
    harness.update()
    harness.update(d0.record)
    assert harness.connections.get("d0") == d0.peer
    harness.answer_checks()
    harness.pump()
    assert harness.connections.get("d0") == d0.peer
    assert ("lost", d0.peer) not in harness.take_events()
    assert harness.agents == [d0.peer]
    assert harness.is_quiet()


def test_one_check_at_a_time(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.alive.add(d0.peer)
    harness.checks_wait = True
    for _ in range(5):
        harness.update()
    assert harness.num_checks == 1
    harness.answer_checks()
    harness.pump()
    harness.update()
    assert harness.num_checks == 2
    harness.alive.clear()
    harness.answer_checks()
    harness.pump(2)
    assert harness.take_events() == [("connected", d0.peer), ("lost", d0.peer)]


def test_a_check_that_fails_proves_nothing(harness: Harness) -> None:
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.checks_wait = True
    harness.update()
    harness.answer_checks(OSError("no more file descriptors"))
    harness.pump()
    assert harness.agents == [d0.peer]
    assert harness.take_events() == [("connected", d0.peer)]
    harness.update()
    harness.answer_checks()
    harness.pump(2)
    assert harness.take_events() == [("lost", d0.peer)]


def test_a_successor_waits_until_the_frozen_process_is_gone(harness: Harness) -> None:
    old, new = harness.start("d0", incarnation=1), harness.start("d0", incarnation=2)
    harness.update(old.record, completions=1)
    harness.alive |= {old.peer, new.peer}
    for _ in range(3):
        harness.update(new.record)
    assert harness.connections.get("d0") is None
    assert harness.agents == [old.peer]
    assert harness.take_events() == [("connected", old.peer)]
    harness.alive.discard(old.peer)
    harness.update(new.record, completions=2)  # the old agent is removed, the new one loaded
    assert harness.connections.get("d0") == new.peer
    assert harness.take_events() == [("lost", old.peer), ("connected", new.peer)]
    assert harness.agents == [new.peer]


def test_a_failed_connection_to_a_frozen_worker_is_kept_as_well(harness: Harness) -> None:
    """It may have failed for this worker, and not for the one that writes."""
    d0 = harness.start("d0")
    harness.update(d0.record, completions=1)
    harness.alive.add(d0.peer)
    harness.connections.mark_failed(d0.peer)
    harness.update()
    assert harness.agents == [d0.peer]
    harness.update(d0.record, completions=1)
    assert harness.connections.get("d0") == d0.peer
    assert harness.take_events()[-1] == ("connected", d0.peer)
    assert ("lost", d0.peer) not in harness.events


def test_a_worker_that_never_could_be_connected_is_forgotten_when_it_leaves(harness: Harness) -> None:
    """Nothing was begun with it: there is nothing to wait for, even if somebody answers at its address."""
    impostors = []
    for number in range(50):
        d0 = harness.start(f"d{number}")
        nobody = msgspec.structs.replace(d0.record.endpoints[0], agent_name="nobody's")
        impostors.append(msgspec.structs.replace(d0.record, endpoints=(nobody,)))
        harness.alive.add(d0.peer)
    harness.update(*impostors, completions=50)
    assert harness.agents == []
    harness.update()
    assert harness.connections.doubted == frozenset()
    assert harness.connections._connections == {}
    assert harness.num_checks == 0
    assert harness.events == []
    harness.update(impostors[0], completions=1)  # it is tried again when it is back
    harness.update()
    assert harness.connections._connections == {}


def test_a_worker_that_freezes_while_it_is_connected_to_is_announced_when_it_is_back(
    harness: Harness,
) -> None:
    d0 = harness.start("d0")
    harness.alive.add(d0.peer)
    harness.connections.update([d0.record])
    harness.connections.update([])
    harness.pump()
    assert harness.connections.get("d0") is None
    assert harness.events == [], "nothing new is begun with a worker that is absent"
    harness.update(d0.record)
    assert harness.connections.get("d0") == d0.peer
    assert harness.take_events() == [("connected", d0.peer)]


def test_a_successor_at_the_same_address_proves_that_the_old_process_is_gone(harness: Harness) -> None:
    """On another machine nothing else would: whoever takes connections there is the new process."""
    old = harness.start("d0", incarnation=1)
    harness.update(old.record, completions=1)
    harness.take_events()
    new = msgspec.structs.replace(old.record, incarnation=2)
    harness.checks_wait = True
    harness.update(new, completions=1)
    assert harness.take_events() == [("lost", old.peer)]
    assert harness.num_checks == 0
