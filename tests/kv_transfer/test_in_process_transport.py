"""The in-process transport behaves as workers rely on it: bytes, futures, failures, removal."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.members import WorkerRecord
from kv_transfer.in_process_transport import InProcessNetwork, InProcessTransport
from kv_transfer.transport import Peer, TransferError
from tests.kv_transfer.peers import LAYOUT, NUM_BLOCKS, Worker, record

SIZE = LAYOUT.block_bytes


class Pair:
    """A prefill worker that is connected to a decode worker."""

    def __init__(self, **prefill_options: Any) -> None:
        self.network = InProcessNetwork()
        self.prefill = Worker(self.network, "p0", "prefill", **prefill_options)
        self.decode = Worker(self.network, "d0", "decode")
        self.add(self.decode.record)
        self.decode.transport.add_peer(self.prefill.record).result(20)

    def add(self, worker: WorkerRecord) -> None:
        self.prefill.transport.add_peer(worker).result(20)

    def write(self, local: list[int], remote: list[int]) -> Future[Any]:
        return self.prefill.transport.write_blocks(self.decode.peer, local, remote)

    def close(self) -> None:
        self.prefill.transport.close()
        self.decode.transport.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.permutations(range(NUM_BLOCKS)),
            st.permutations(range(NUM_BLOCKS)),
            st.integers(0, NUM_BLOCKS),
        ),
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_any_writes_leave_the_bytes_that_were_asked_for(
    writes: list[tuple[list[int], list[int], int]], seed: int
) -> None:
    pair = Pair()
    source = random.Random(seed).randbytes(NUM_BLOCKS * SIZE)
    ctypes.memmove(pair.prefill.cache, source, len(source))
    expected = bytearray(NUM_BLOCKS * SIZE)
    for local, remote, count in writes:
        stats = pair.write(local[:count], remote[:count]).result(20)
        assert stats.num_bytes == count * SIZE
        assert stats.num_descriptors <= count
        for ours, theirs in zip(local[:count], remote[:count], strict=True):
            expected[theirs * SIZE : (theirs + 1) * SIZE] = source[ours * SIZE : (ours + 1) * SIZE]
    assert pair.decode.cache.raw[: len(expected)] == bytes(expected)
    assert pair.prefill.transport.counters().bytes_written == sum(count for *_, count in writes) * SIZE
    pair.close()


def test_a_notification_after_a_write_finds_its_bytes(pair: Pair) -> None:
    seen: list[tuple[bytes, bytes]] = []
    arrived = threading.Event()

    def handler(payload: bytes) -> None:
        seen.append((payload, pair.decode.cache.raw[SIZE : SIZE + 1]))
        arrived.set()

    pair.decode.transport.on_notification(handler)
    ctypes.memset(pair.prefill.cache, 7, NUM_BLOCKS * SIZE)
    pair.write([2], [1]).result(20)
    pair.prefill.transport.notify(pair.decode.peer, b"sealed").result(20)
    assert arrived.wait(20)
    assert seen == [(b"sealed", b"\x07")]


def test_a_handler_that_raises_does_not_stop_the_transport(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    arrived = threading.Event()

    def handler(payload: bytes) -> None:
        if payload == b"bad":
            raise RuntimeError("a bug")
        arrived.set()

    pair.decode.transport.on_notification(handler)
    for payload in (b"bad", b"good"):
        pair.prefill.transport.notify(pair.decode.peer, payload).result(20)
    assert arrived.wait(20)
    assert "the handler of a notification from p0@1 failed" in caplog.text


def test_a_notification_from_a_stranger_is_dropped_and_counted(pair: Pair) -> None:
    got: list[bytes] = []
    pair.decode.transport.on_notification(got.append)
    pair.decode.transport.remove_peer(pair.prefill.peer).result(20)
    pair.prefill.transport.notify(pair.decode.peer, b"x").result(20)
    pair.decode.transport.remove_peer(pair.prefill.peer).result(20)  # by now it has been handled
    assert got == []
    assert pair.decode.transport.counters().notifications_dropped == 1


@pytest.mark.parametrize(
    ("local", "remote", "named"),
    [
        ([NUM_BLOCKS], [0], f"local block id {NUM_BLOCKS}"),
        ([0], [NUM_BLOCKS], f"remote block id {NUM_BLOCKS}"),
        ([-1], [0], "local block id -1"),
        ([0, 1], [0], "2 local and 1 remote"),
        ([0, 1], [2, 2], "remote block 2 is written twice"),
    ],
)
def test_wrong_blocks_are_refused(pair: Pair, local: list[int], remote: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pair.write(local, remote)
    assert pair.decode.cache.raw == bytes(len(pair.decode.cache))


def test_a_write_of_nothing_is_done_at_once(pair: Pair) -> None:
    assert pair.write([], []).result(0).num_bytes == 0


def test_a_failed_write_leaves_part_of_its_bytes_and_drops_the_peer() -> None:
    pair = Pair(fail_write=lambda peer, number: True)
    ctypes.memset(pair.prefill.cache, 7, NUM_BLOCKS * SIZE)
    with pytest.raises(TransferError, match="d0@1: a write failed"):
        pair.write([0, 2], [1, 3]).result(20)
    assert set(pair.decode.cache.raw[SIZE : 2 * SIZE]) == {7}
    assert set(pair.decode.cache.raw[3 * SIZE :]) == {0}
    assert pair.prefill.transport.peers() == ()
    with pytest.raises(TransferError, match="d0@1 is no longer a peer: a write failed"):
        pair.write([1], [1]).result(20)
    counters = pair.prefill.transport.counters()
    assert (counters.writes_posted, counters.writes_failed, counters.peers_failed) == (1, 1, 1)
    pair.close()


def test_a_failed_notification_drops_the_peer() -> None:
    pair = Pair(fail_notify=lambda peer, number: number == 1)
    pair.prefill.transport.notify(pair.decode.peer, b"first").result(20)
    with pytest.raises(TransferError, match="a notification failed"):
        pair.prefill.transport.notify(pair.decode.peer, b"second").result(20)
    assert pair.prefill.transport.peers() == ()
    pair.close()


def test_a_peer_that_closed_fails_writes_and_notifications(pair: Pair) -> None:
    pair.decode.transport.close()
    with pytest.raises(TransferError, match="its transport is closed"):
        pair.write([1], [1]).result(20)
    with pytest.raises(TransferError, match="no agent 'd0@1' here"):
        pair.add(pair.decode.record)


def test_removal_and_closing_fail_what_is_in_flight() -> None:
    pair = Pair(write_delay_s=3600.0)
    removed = pair.write([1], [1])
    pair.prefill.transport.remove_peer(pair.decode.peer).result(20)
    with pytest.raises(TransferError, match="d0@1: removed"):
        removed.result(0)
    pair.add(pair.decode.record)
    closed = pair.write([1], [1])
    pair.prefill.transport.close()
    with pytest.raises(TransferError, match="this transport is closed"):
        closed.result(0)
    with pytest.raises(TransferError, match="the transport is closed"):
        pair.write([1], [1]).result(0)
    pair.prefill.transport.close()  # again is fine
    pair.close()


def test_a_new_incarnation_replaces_the_old_one_and_never_the_other_way(pair: Pair) -> None:
    again = Worker(pair.network, "d0", "decode", incarnation=2)
    pair.add(again.record)
    pair.add(again.record)  # idempotent
    assert [info.peer for info in pair.prefill.transport.peers()] == [again.peer]
    assert pair.prefill.transport.counters().peers_added == 2
    with pytest.raises(TransferError, match="replaced by incarnation 2"):
        pair.write([1], [1]).result(20)
    with pytest.raises(TransferError, match="d0@1 is older than d0@2"):
        pair.add(pair.decode.record)
    again.transport.close()


def test_unknown_peers_are_named_with_those_that_exist(pair: Pair) -> None:
    with pytest.raises(TransferError, match="d9@1 is not a peer; current peers: d0@1"):
        pair.prefill.transport.write_blocks(Peer("d9", 1), [1], [1]).result(20)
    pair.prefill.transport.remove_peer(Peer("d9", 1)).result(20)


def test_a_worker_is_not_its_own_peer_nor_that_of_another_kind(pair: Pair) -> None:
    with pytest.raises(TransferError, match="is this worker itself"):
        pair.add(record("p0", "decode", 2))
    other_kind = record("d5", "decode", endpoint=_endpoint(kind="nixl"))
    with pytest.raises(TransferError, match="reachable over 'nixl', this worker over 'in_process'"):
        pair.add(other_kind)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"agent_name": ""}, "agent_name"),
        ({"base_address": 0}, "address 0"),
        ({"num_blocks": 0}, "0 blocks"),
        ({"write_delay_s": -1.0}, "write_delay_s"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], named: str) -> None:
    arguments = {"agent_name": "a", "base_address": 4096, "layout": LAYOUT, "num_blocks": 1, **options}
    with pytest.raises(ValueError, match=named):
        InProcessTransport(InProcessNetwork(), **arguments)


def test_two_transports_of_one_name_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="'p0@1' is already in use"):
        Worker(pair.network, "p0", "prefill")


def test_callers_of_many_threads_lose_no_write(pair: Pair) -> None:
    def run() -> None:
        for _ in range(50):
            pair.write([1], [2]).result(20)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pair.prefill.transport.counters().writes_completed == 200


def _endpoint(kind: str) -> Any:
    template = record("x", "decode").endpoint
    return type(template)(
        kind=kind, agent_name="other", metadata=b"", base_address=1, num_blocks=template.num_blocks
    )
