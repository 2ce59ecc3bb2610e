"""Real NIXL between processes that freeze, die and return: every future ends, and no byte lands unnoticed.

Over TCP, because there a frozen target keeps writes in flight; within one host the writer copies by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.kv_transfer.nixl.nixl_peer import NUM_BLOCKS, content, digest
from tests.kv_transfer.peer_process import TCP, CommandError, PeerProcess, connect

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

NUM_WRITES = 4  # of 64 MB: more than socket buffers take

StartPair = Callable[[int], tuple[PeerProcess, PeerProcess]]


@pytest.fixture
def start() -> Iterator[Callable[..., PeerProcess]]:
    """Starts processes that end with the test."""
    with ExitStack() as stack:

        def start(*arguments: str | int, write_timeout_ms: int = 20_000) -> PeerProcess:
            process = PeerProcess(*arguments, environment=TCP, write_timeout_ms=write_timeout_ms)  # type: ignore[arg-type]
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def start_pair(start: Callable[..., PeerProcess]) -> StartPair:
    """Starts a connected pair. The prefill worker has the given write timeout, in ms, and a filled cache."""

    def start_pair(write_timeout_ms: int) -> tuple[PeerProcess, PeerProcess]:
        prefill = start("prefill-0", "prefill", write_timeout_ms=write_timeout_ms)
        decode = start("decode-0", "decode")
        prefill.wait_until_ready()
        decode.wait_until_ready()
        connect(prefill, decode)
        prefill("fill", seed=1)
        return prefill, decode

    return start_pair


def writes_to_frozen(prefill: PeerProcess, decode: PeerProcess) -> None:
    """Freeze the target and start writes, of which the last cannot end."""
    decode.freeze()
    prefill("start_writes", peer=decode.peer, count=NUM_WRITES)
    assert prefill("outcomes", timeout_s=0.2)[-1] == "pending"


def test_a_killed_target_fails_writes_at_once_and_its_successor_is_another_peer(
    start: Callable[..., PeerProcess], start_pair: StartPair
) -> None:
    prefill, decode = start_pair(20_000)
    again = start("decode-0", "decode", 2)
    writes_to_frozen(prefill, decode)
    decode.kill()
    outcomes = prefill("outcomes", timeout_s=10.0)
    assert outcomes[-1].startswith("TransferError: decode-0@1: a write failed")
    assert "pending" not in outcomes
    with pytest.raises(CommandError, match="TransferError: decode-0@1 is no longer a peer: a write failed"):
        prefill("write", peer=decode.peer, local=[1], remote=[1])

    again.wait_until_ready()
    connect(prefill, again)  # without a removal: the old one is gone by the new one's arrival
    assert prefill("peers") == [["decode-0", True]]
    prefill("write", peer=again.peer, local=[3], remote=[4])
    assert again("digests", blocks=[4]) == [digest(content(3, 1))]
    with pytest.raises(CommandError, match="TransferError: decode-0@1 is no longer a peer"):
        prefill("write", peer=decode.peer, local=[1], remote=[1])


def test_a_killed_target_that_nobody_was_writing_to_is_noticed_by_the_next_write(
    start: Callable[..., PeerProcess], start_pair: StartPair
) -> None:
    prefill, decode = start_pair(3000)
    again = start("decode-0", "decode", 2)
    decode.kill()
    prefill("start_writes", peer=decode.peer, count=NUM_WRITES)
    assert all(outcome.startswith("TransferError") for outcome in prefill("outcomes", timeout_s=10.0))
    again.wait_until_ready()
    connect(prefill, again)
    assert prefill("peers") == [["decode-0", True]]


def test_a_restart_under_the_same_id_replaces_a_peer_that_was_not_known_to_be_dead(
    start: Callable[..., PeerProcess], start_pair: StartPair
) -> None:
    prefill, decode = start_pair(20_000)
    again = start("decode-0", "decode", 2)
    again.wait_until_ready()
    connect(prefill, again)
    assert prefill("peers") == [["decode-0", True]]
    prefill("write", peer=again.peer, local=[3], remote=[4])
    assert again("digests", blocks=[4]) == [digest(content(3, 1))]
    with pytest.raises(CommandError, match="decode-0@1 is no longer a peer: replaced by incarnation 2"):
        prefill("write", peer=decode.peer, local=[1], remote=[1])
    with pytest.raises(CommandError, match="decode-0@1 is older than decode-0@2"):
        prefill("add", record=decode.record)


def test_a_write_that_takes_too_long_is_watched_until_it_has_landed(start_pair: StartPair) -> None:
    prefill, decode = start_pair(1000)
    writes_to_frozen(prefill, decode)
    outcome = prefill("outcomes", timeout_s=10.0)[-1]
    assert outcome.startswith("WriteAbandonedError: decode-0@1: a write of ")
    assert outcome.endswith("was not done after 1.0 s")
    assert prefill("peers") == []
    with pytest.raises(CommandError, match="a write to decode-0@1 is not over: it may still land"):
        prefill("add", record=decode.record)
    decode.thaw()
    assert prefill("wait_until_over") > 0
    assert decode("digests")[1:] == [digest(content(block_id, 1)) for block_id in range(1, NUM_BLOCKS)]
    prefill("add", record=decode.record)
    prefill("write", peer=decode.peer, local=[3], remote=[4])
    assert decode("digests", blocks=[4]) == [digest(content(3, 1))]


def test_a_write_that_takes_too_long_is_over_when_its_target_dies(start_pair: StartPair) -> None:
    prefill, decode = start_pair(1000)
    writes_to_frozen(prefill, decode)
    assert prefill("outcomes", timeout_s=10.0)[-1].startswith("WriteAbandonedError")
    decode.kill()
    assert prefill("wait_until_over") > 0


def test_removal_waits_for_writes_in_flight_and_lets_no_new_ones_begin(start_pair: StartPair) -> None:
    prefill, decode = start_pair(20_000)
    writes_to_frozen(prefill, decode)
    prefill("start_remove", peer=decode.peer)
    with pytest.raises(CommandError, match="TransferError: decode-0@1 is no longer a peer: removed"):
        prefill("write", peer=decode.peer, local=[1], remote=[1])
    assert prefill("outcomes", timeout_s=0.5)[-2:] == ["pending", "pending"]
    decode.thaw()
    assert prefill("outcomes") == ["done"] * (NUM_WRITES + 1)
    assert prefill("peers") == []
    expected = [digest(content(block_id, 1)) for block_id in range(1, NUM_BLOCKS)]
    assert decode("digests")[1:] == expected
    prefill("add", record=decode.record)
    prefill("write", peer=decode.peer, local=[3], remote=[4])


def test_removal_of_a_target_that_stays_frozen_ends_with_the_write_timeout(start_pair: StartPair) -> None:
    prefill, decode = start_pair(1000)
    writes_to_frozen(prefill, decode)
    prefill("start_remove", peer=decode.peer)
    *_, write, removal = prefill("outcomes", timeout_s=10.0)
    assert write.startswith("WriteAbandonedError")
    assert removal == "done"
    assert prefill("close") is None
    assert prefill.end() == 0


def test_once_a_dead_writer_is_removed_nothing_it_had_sent_can_land(start_pair: StartPair) -> None:
    prefill, decode = start_pair(20_000)
    writes_to_frozen(prefill, decode)
    prefill.kill()
    decode.post("remove", peer=prefill.peer)
    decode.thaw()  # it may find the removal before what the writer had sent
    assert decode.answer() >= 20, "it looked for what may still come"
    decode("expect", key="whatever may still come")
    time.sleep(0.5)
    assert not decode("has_changed_since_removal")


def test_closing_fails_what_is_in_flight_and_does_not_hang(start_pair: StartPair) -> None:
    prefill, decode = start_pair(20_000)
    writes_to_frozen(prefill, decode)
    prefill("close")
    assert prefill("outcomes", timeout_s=0.0)[-1] == "TransferError: decode-0@1: this transport is closed"
    with pytest.raises(CommandError, match="no longer a peer: this transport is closed"):
        prefill("write", peer=decode.peer, local=[1], remote=[1])
    assert prefill.end() == 0
