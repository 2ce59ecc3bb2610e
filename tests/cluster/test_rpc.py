"""Messages over real sockets: order, lost and restarted peers, older incarnations, addresses."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster import rpc
from cluster.messages import Envelope, Generate, KvEvents, Message, Prefill
from cluster.rpc import RpcError, RpcOverloadedError, RpcServer
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import RequestKey, SequenceSpec
from tests.cluster.rpc_cluster import Client, Cluster, numbered, numbers, until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


# --- delivery --------------------------------------------------------------------------------------------


async def test_messages_arrive_in_order_both_ways(cluster: Cluster) -> None:
    worker, address = await cluster.worker(incarnation=7)
    worker.react = lambda peer, message: None if worker.server.send(peer, message) else pytest.fail("gone")
    client = cluster.client(address, incarnation=3)
    for number in range(500):
        client.connection.send(numbered(number))
    await until(lambda: len(client.envelopes) == 500, "the echoes")
    assert numbers(client.messages) == list(range(500))
    assert numbers(worker.messages_of("router")) == list(range(500))
    assert {(peer, incarnation) for peer, incarnation, _ in worker.received} == {("router", 3)}
    assert {(envelope.sender, envelope.incarnation) for envelope in client.envelopes} == {("worker", 7)}


async def test_every_field_of_a_message_survives(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = cluster.client(address)
    sampling = SamplingParams(max_tokens=5, seed=2**63, temperature=0.25, logit_bias={17: -2.5}, logprobs=3)
    generate = Generate(
        key=RequestKey("söme/id", 2),
        spec=SequenceSpec(
            prompt_token_ids=[0, 49151],
            sampling=sampling,
            output_token_ids=[4],
            cache_salt="tenant",
            deadline=1_700_000_000.25,
        ),
        prefill_worker="p0",
    )
    prefill = Prefill(
        key=RequestKey("r", 1),
        spec=SequenceSpec(prompt_token_ids=[1], sampling=sampling),
        prefill_incarnation=4,
        first_block=3,
        block_ids=[9, 4],
    )
    client.connection.send(generate)
    client.connection.send(prefill)
    await until(lambda: len(worker.received) == 2, "both messages")
    assert worker.messages_of("router") == [generate, prefill]


async def test_large_messages_go_both_ways(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = cluster.client(address)
    snapshot = KvEvents(sequence=1, stored=[number.to_bytes(32) for number in range(200_000)], snapshot=True)
    worker.react = lambda peer, message: None if worker.server.send(peer, snapshot) else pytest.fail("gone")
    request = Generate(
        key=RequestKey("long", 1),
        spec=SequenceSpec(
            prompt_token_ids=list(range(500_000)), sampling=SamplingParams(max_tokens=1, seed=0)
        ),
    )
    client.connection.send(request)
    await until(lambda: bool(client.envelopes), "the snapshot")
    assert worker.messages_of("router") == [request]
    assert client.messages == [snapshot]


async def test_each_peer_gets_its_own_answers(cluster: Cluster) -> None:
    def has_all(client: Client) -> bool:
        return len(client.envelopes) == 100

    worker, address = await cluster.worker()
    clients = {
        name: await cluster.known_client(worker, address, sender=name) for name in ("a", "b", "c", "d")
    }
    for number in range(100):
        for index, name in enumerate(clients):
            assert worker.server.send(name, numbered(index * 1000 + number))
    for index, client in enumerate(clients.values()):
        await until(functools.partial(has_all, client), "the answers")
        assert numbers(client.messages) == [index * 1000 + number for number in range(100)]


async def test_ten_thousand_messages_while_both_sides_send(cluster: Cluster) -> None:
    """The sockets' descriptors are edge-triggered: a send may swallow the edge of an arrival."""
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    for number in range(10_000):
        client.connection.send(numbered(number))
        assert worker.server.send("router", numbered(number))
        if number % 50 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(client.envelopes) + len(worker.received) >= 20_000, "all messages")
    assert numbers(client.messages) == list(range(10_000))
    assert numbers(worker.messages_of("router")) == list(range(10_000))


@pytest.mark.parametrize("answering", ["worker", "client"])
async def test_a_send_does_not_swallow_an_arrival(cluster: Cluster, answering: str) -> None:
    """A send empties the descriptor of a message that came before it: nothing would tell of that one."""
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)

    def from_client(number: int) -> None:
        client.connection.send(numbered(number))

    def from_worker(number: int) -> None:
        assert worker.server.send("router", numbered(number))

    def both_have(number: int) -> bool:
        return len(client.envelopes) == len(worker.received) == number

    first, second = (from_client, from_worker) if answering == "worker" else (from_worker, from_client)
    for number in range(5):
        first(number)
        time.sleep(0.02)  # noqa: ASYNC251 - the message arrives while the loop is busy
        second(number)
        await until(functools.partial(both_have, number + 1), "both messages")


async def test_ping_pong_never_stalls(cluster: Cluster) -> None:
    """Each message is the answer to the one before: one missed edge, and nothing ever moves again."""
    worker, address = await cluster.worker()
    client = cluster.client(address)

    def answer(peer: str, message: Message) -> None:
        assert worker.server.send(peer, message)

    def ask_next(envelope: Envelope) -> None:
        if len(client.envelopes) < 5000:
            client.connection.send(numbered(len(client.envelopes)))

    worker.react, client.react = answer, ask_next
    client.connection.send(numbered(0))
    await until(lambda: len(client.envelopes) == 5000, "the last answer")
    assert numbers(client.messages) == list(range(5000))


async def test_a_flood_leaves_turns_to_other_tasks(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    for number in range(5000):
        client.connection.send(numbered(number))
    seen = [0]
    while seen[-1] < 5000:
        await asyncio.sleep(0)
        seen.append(len(worker.received))
    # The descriptor and the drain that follows each may have had a turn in between.
    most = max(later - earlier for earlier, later in itertools.pairwise(seen))
    assert most <= 2 * rpc._MAX_MESSAGES_PER_TURN


# --- whose word counts -----------------------------------------------------------------------------------


async def test_messages_of_an_older_incarnation_are_dropped(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    old = await cluster.known_client(worker, address, incarnation=1)
    new = await cluster.known_client(worker, address, incarnation=2)
    old.connection.send(numbered(1))
    await until(lambda: worker.server.num_stale == 1, "the stale message")
    assert worker.server.send("router", numbered(2))
    await until(lambda: bool(new.envelopes), "the answer")
    assert worker.received == []
    assert old.envelopes == []


async def test_stale_messages_are_counted_per_sender(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    await cluster.known_client(worker, address, sender="a", incarnation=9)
    other = await cluster.known_client(worker, address, sender="b", incarnation=1)
    other.connection.send(numbered(4))
    await until(lambda: len(worker.received) == 1, "the other sender's message")
    assert worker.server.num_stale == 0


async def test_a_forgotten_peer_gets_nothing_until_it_speaks(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    worker.server.forget("router")
    worker.server.forget("never seen")
    assert not worker.server.send("router", numbered(1))
    client.connection.send(numbered(2))
    await until(lambda: len(worker.received) == 1, "the peer's next message")
    assert worker.server.send("router", numbered(3))
    await until(lambda: bool(client.envelopes), "the answer")
    assert numbers(client.messages) == [3]


# --- peers that are not there ------------------------------------------------------------------------------


async def test_sending_to_an_unknown_peer(cluster: Cluster) -> None:
    worker, _ = await cluster.worker()
    assert not worker.server.send("nobody", numbered(1))
    assert worker.server.num_undeliverable == 1


async def test_sending_before_bind_and_after_close(cluster: Cluster) -> None:
    unbound = RpcServer(sender="worker", incarnation=1, on_message=lambda *_: None)
    assert not unbound.send("router", numbered(1))
    await unbound.close()
    worker, address = await cluster.worker()
    await cluster.known_client(worker, address)
    await worker.server.close()
    await worker.server.close()
    assert not worker.server.send("router", numbered(1))
    assert worker.server.num_undeliverable == 1


async def test_sending_to_a_peer_that_has_gone(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    other = await cluster.known_client(worker, address, sender="other")
    client.connection.close()
    await until(lambda: not worker.server.send("router", numbered(1)), "the loss of the peer")
    assert worker.server.num_undeliverable == 1
    assert worker.server.send("other", numbered(2)), "others are served as before"
    await until(lambda: bool(other.envelopes), "the other's message")


async def test_what_was_queued_is_delivered_after_close(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    for number in range(100):
        client.connection.send(numbered(number))
    client.connection.close()
    await until(lambda: len(worker.received) == 100, "the messages of a closed connection")


async def test_a_closed_connection_refuses_messages(cluster: Cluster) -> None:
    _, address = await cluster.worker()
    client = cluster.client(address)
    client.connection.close()
    client.connection.close()
    with pytest.raises(RpcOverloadedError, match=f"the connection to {address} is closed"):
        client.connection.send(numbered(1))


async def test_a_handler_may_close_its_own_connection(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)
    client.react = lambda envelope: client.connection.close()
    for number in range(200):
        worker.server.send("router", numbered(number))
    await until(lambda: not worker.server.send("router", numbered(0)), "the loss of the peer")
    assert numbers(client.messages) == [0]
    assert "Traceback" not in caplog.text


async def test_the_connection_survives_a_restart_of_the_worker(cluster: Cluster) -> None:
    first, address = await cluster.worker(incarnation=1)
    client = await cluster.known_client(first, address)
    await first.server.close()
    second = await cluster.worker_again(address, incarnation=2)
    second.react = lambda peer, message: None if second.server.send(peer, message) else pytest.fail("gone")

    def is_answered() -> bool:
        # Again and again: what went into the dying connection is lost, delivery is at most once.
        client.connection.send(numbered(5))
        return bool(client.envelopes)

    await until(is_answered, "an answer of the restarted worker")
    assert client.envelopes[0] == Envelope("worker", 2, numbered(5))


async def test_a_worker_may_start_after_its_peers(cluster: Cluster, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/w"
    client = cluster.client(address)
    for number in range(100):
        client.connection.send(numbered(number))
    worker, bound = await cluster.worker(address)
    assert bound == address
    await until(lambda: len(worker.received) == 100, "what was sent before the worker listened")
    assert numbers(worker.messages_of("router")) == list(range(100))


# --- addresses ---------------------------------------------------------------------------------------------


async def test_port_0_becomes_a_real_port(cluster: Cluster) -> None:
    (_, one), (_, two) = await cluster.worker(), await cluster.worker()
    assert one != two
    assert all(address.startswith("tcp://127.0.0.1:") for address in (one, two))
    assert all(int(address.rpartition(":")[2]) > 0 for address in (one, two))


async def test_an_address_in_use_is_refused(cluster: Cluster) -> None:
    _, address = await cluster.worker()
    with pytest.raises(RpcError, match=f"cannot listen at {address}: Address already in use"):
        await cluster.worker(address)


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1", "udp://127.0.0.1:1", ""])
async def test_an_impossible_address_is_refused(cluster: Cluster, address: str) -> None:
    with pytest.raises(RpcError, match=f"cannot listen at {address}"):
        await cluster.worker(address)
