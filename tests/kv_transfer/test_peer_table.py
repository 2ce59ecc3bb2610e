"""A transport's table of peers: one incarnation per worker, and reasons for those that are gone."""

from __future__ import annotations

import msgspec
import pytest

from cluster.members import Peer
from kv_transfer.peer_table import PeerTable, check_peer_record
from kv_transfer.transport import TransferError
from tests.kv_transfer.peers import LAYOUT, record

D1, D2 = Peer("d0", 1), Peer("d0", 2)


def test_peers_are_found_by_identity_and_by_worker() -> None:
    table: PeerTable[str] = PeerTable()
    table.add(D1, "first")
    assert table.get(D1) == table.require(D1) == "first"
    assert table.get(D2) is None
    assert table.incarnation_of("d0") == D1
    assert table.incarnation_of("d9") is None


def test_a_snapshot_does_not_change() -> None:
    table: PeerTable[str] = PeerTable()
    table.add(D1, "first")
    snapshot = table.snapshot()
    table.remove(D1, "removed")
    assert dict(snapshot) == {D1: "first"}
    assert dict(table.snapshot()) == {}


def test_a_missing_peer_is_explained() -> None:
    table: PeerTable[str] = PeerTable()
    with pytest.raises(TransferError, match="d0@1 is not a peer; current peers: none"):
        table.require(D1)
    table.add(D1, "first")
    table.remove(D1, "its link broke")
    table.add(D2, "second")
    with pytest.raises(TransferError, match="d0@1 is no longer a peer: its link broke"):
        table.require(D1)
    with pytest.raises(TransferError, match="d9@1 is not a peer; current peers: d0@2"):
        table.require(Peer("d9", 1))


def test_a_peer_that_returns_is_not_gone_any_more() -> None:
    table: PeerTable[str] = PeerTable()
    table.add(D1, "first")
    table.remove(D1, "its link broke")
    table.add(D1, "again")
    assert table.require(D1) == "again"


def test_only_so_many_reasons_are_kept() -> None:
    table: PeerTable[str] = PeerTable()
    peers = [Peer(f"d{number}", 1) for number in range(1000)]
    for peer in peers:
        table.add(peer, "")
        table.remove(peer, "removed")
    with pytest.raises(TransferError, match="is no longer a peer: removed"):
        table.require(peers[-1])
    with pytest.raises(TransferError, match="is not a peer"):
        table.require(peers[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_layout": msgspec.structs.replace(LAYOUT, block_size=4)}, "d0@1 has another KV layout"),
        (
            {"endpoints": (msgspec.structs.replace(record("d0", "decode").endpoints[0], kind="other"),)},
            "d0@1 is reachable over 'other', this worker over 'nixl'",
        ),
        ({"id": "p0"}, "p0@1 is this worker itself"),
    ],
)
def test_records_of_unusable_peers_are_refused(change: dict[str, object], named: str) -> None:
    usable = record("d0", "decode")
    check_peer_record(usable, kind="nixl", layout=LAYOUT, own=Peer("p0", 2))
    with pytest.raises(TransferError, match=named):
        check_peer_record(
            msgspec.structs.replace(usable, **change), kind="nixl", layout=LAYOUT, own=Peer("p0", 2)
        )
