"""Real NIXL between two real processes that are well: bytes, notifications, first contact, idling."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.kv_transfer.nixl.nixl_peer import LAYOUT, NUM_BLOCKS, content, digest
from tests.kv_transfer.peer_process import SHARED_MEMORY, TCP, CommandError, PeerProcess, connect

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

Pair = tuple[PeerProcess, PeerProcess]


def start_pair(environment: Mapping[str, str], **options: Any) -> Pair:
    prefill = PeerProcess("prefill-0", "prefill", environment=environment, **options)
    decode = PeerProcess("decode-0", "decode", environment=environment, **options)
    prefill.wait_until_ready()
    decode.wait_until_ready()
    return prefill, decode


@pytest.fixture(scope="module", params=[SHARED_MEMORY, TCP], ids=["shared_memory", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A connected pair that all tests of this file share."""
    prefill, decode = start_pair(request.param)
    connect(prefill, decode)
    yield prefill, decode
    prefill.kill()
    decode.kill()


def test_peers_are_warm_once_added_and_adding_again_changes_nothing(pair: Pair) -> None:
    prefill, decode = pair
    connect(prefill, decode)
    assert prefill("peers") == [["decode-0", True]]
    assert decode("peers") == [["prefill-0", True]]


def test_blocks_arrive_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    prefill, decode = pair
    prefill("fill", seed=1)
    decode("fill", seed=2)
    expected = [digest(content(block_id, 2)) for block_id in range(NUM_BLOCKS)]
    order = random.Random(3)
    for num_blocks in (1, 2, 17, 125):
        local = order.sample(range(1, NUM_BLOCKS), num_blocks)
        remote = order.sample(range(1, NUM_BLOCKS), num_blocks)
        assert prefill("write", peer=decode.peer, local=local, remote=remote)[0] == (
            num_blocks * LAYOUT.block_bytes
        )
        for ours, theirs in zip(local, remote, strict=True):
            expected[theirs] = digest(content(ours, 1))
    assert decode("digests")[1:] == expected[1:]


def test_runs_become_one_descriptor(pair: Pair) -> None:
    prefill, decode = pair
    prefill("fill", seed=4)
    written = prefill("write", peer=decode.peer, local=[5, 6, 7, 20], remote=[11, 12, 13, 40])
    assert written == [4 * LAYOUT.block_bytes, 2]
    assert decode("digests", blocks=[11, 12, 13, 40]) == [
        digest(content(block, 4)) for block in (5, 6, 7, 20)
    ]


def test_a_notification_sent_after_a_write_finds_its_bytes(pair: Pair) -> None:
    prefill, decode = pair
    decode("expect", key="request")
    before = len(decode("received", count=0))
    blocks = list(range(1, 120))
    for seed in (5, 6, 7):
        prefill("fill", seed=seed)
        prefill("write", peer=decode.peer, local=blocks, remote=blocks)
        prefill("notify", peer=decode.peer, payload=f"sealed {seed}")
    decode("stop_expecting", key="request")
    received = decode("received", count=before + 3)[before:]
    assert [payload for payload, _ in received] == ["sealed 5", "sealed 6", "sealed 7"]
    assert received[-1][1] == digest(content(1, 7))


def test_a_notification_reaches_a_worker_that_does_not_expect_one(pair: Pair) -> None:
    prefill, decode = pair
    before = len(prefill("received", count=0))
    decode("notify", peer=prefill.peer, payload="hello")
    assert prefill("received", count=before + 1)[before][0] == "hello"


def test_a_path_is_measured_when_it_is_set_up_and_with_each_large_write(pair: Pair) -> None:
    prefill, decode = pair
    ((probe, link),) = prefill("links")
    assert probe > 0
    assert link > 0
    prefill("write", peer=decode.peer, local=[1], remote=[1])
    assert prefill("links") == [[probe, link]], "small writes tell of latency only"
    blocks = list(range(1, NUM_BLOCKS))
    prefill("write", peer=decode.peer, local=blocks, remote=blocks)
    ((unchanged, moved),) = prefill("links")
    assert unchanged == probe, "what later writes are compared with"
    assert moved > 0
    assert moved != link
    ((other_probe, other_link),) = decode("links")
    assert other_probe > 0
    assert other_link == other_probe, "nothing was written that way since"


@pytest.mark.parametrize(
    ("local", "remote", "named"),
    [
        ([NUM_BLOCKS], [1], f"ValueError: source block id {NUM_BLOCKS}"),
        ([1], [NUM_BLOCKS], f"ValueError: target block id {NUM_BLOCKS}"),
        ([1, 2], [3], "ValueError: blocks are copied pairwise, got 2 local and 1 remote"),
    ],
)
def test_wrong_blocks_are_refused(pair: Pair, local: list[int], remote: list[int], named: str) -> None:
    prefill, decode = pair
    with pytest.raises(CommandError, match=named):
        prefill("write", peer=decode.peer, local=local, remote=remote)


def test_an_unknown_peer_is_named(pair: Pair) -> None:
    prefill, _ = pair
    with pytest.raises(CommandError, match=r"TransferError: decode-9@1 is not a peer; .*: decode-0@1"):
        prefill("write", peer=["decode-9", 1], local=[1], remote=[1])


def test_idle_workers_sleep_between_polls(pair: Pair) -> None:
    """Counted, so that it holds on machines of any speed: one that spins polls 10^5 times a second."""
    prefill, decode = pair
    decode("expect", key="request")
    prefill.post("idle", seconds=0.3)
    polls, seconds = decode("idle", seconds=0.3)
    assert polls <= 200 + 500 * seconds  # short sleeps after the last activity, then 2 ms
    polls, seconds = prefill.answer()
    assert polls <= 200 + 10 * seconds
    decode("stop_expecting", key="request")


def test_a_handler_that_raises_does_not_stop_the_transport(pair: Pair) -> None:
    prefill, decode = pair
    before = len(decode("received", count=0))
    for payload in ("raise", "after"):
        prefill("notify", peer=decode.peer, payload=payload)
    received = decode("received", count=before + 2)[before:]
    assert [payload for payload, _ in received] == ["raise", "after"]


def test_what_was_done_is_counted(pair: Pair) -> None:
    prefill, decode = pair
    before = prefill("counters")
    num_received = len(decode("received", count=0))
    prefill("write", peer=decode.peer, local=[1, 2, 5], remote=[3, 4, 9])
    prefill("write", peer=decode.peer, local=[], remote=[])  # of nothing: done at once
    prefill("notify", peer=decode.peer, payload="counted")
    after = prefill("counters")
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed.pop("write_seconds_total") > 0
    assert changed.pop("polls_total") > 0
    assert changed == {
        "writes_total": 1,
        "bytes_total": 3 * LAYOUT.block_bytes,
        "descriptors_total": 2,
        "notifications_sent_total": 1,
    }
    decode("received", count=num_received + 1)
    assert decode("counters")["notifications_received_total"] == num_received + 1


def test_notifications_of_strangers_are_dropped_and_counted(pair: Pair) -> None:
    prefill, decode = pair
    before = len(decode("received", count=0))
    decode("remove", peer=prefill.peer)
    prefill("notify", peer=decode.peer, payload="from nobody")
    decode("wait_for_counter", name="notifications_dropped_total", value=1)
    assert len(decode("received", count=0)) == before
    prefill("remove", peer=decode.peer)
    connect(prefill, decode)


def test_first_contact_with_an_idle_worker_that_knows_nobody() -> None:
    """And: a process that exits without closing its transport, in the middle of polling, ends cleanly."""
    prefill, decode = start_pair(SHARED_MEMORY)
    try:
        prefill("add", record=decode.record)
        assert prefill("peers") == [["decode-0", True]], "it did not wait until its patience ended"
        prefill("fill", seed=8)
        prefill("write", peer=decode.peer, local=[3], remote=[4])
        assert decode("digests", blocks=[4]) == [digest(content(3, 8))]
        decode("expect", key="request")
        assert decode.end() == 0
        prefill("close")
        assert prefill.end() == 0
    finally:
        prefill.kill()
        decode.kill()
