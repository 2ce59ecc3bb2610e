"""Messages over real sockets: order, lost and restarted peers, full queues, garbage."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from cluster import rpc
from cluster.messages import Cancel, Envelope, Generate, KvEvents, Message, Prefill
from cluster.rpc import RpcConnection, RpcError, RpcOverloadedError, RpcServer
from cluster.sampling_params import SamplingParams

LOCALHOST = "tcp://127.0.0.1:0"


def numbered(number: int) -> Cancel:
    return Cancel(request_id=f"r{number}", attempt=number)


def numbers(messages: list[Message]) -> list[int]:
    return [message.attempt for message in messages if isinstance(message, Cancel)]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; fails with ``what`` where it does not."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"waited in vain for {what}")


class Worker:
    """A server that records what it is sent, and may answer it."""

    def __init__(self, incarnation: int = 1) -> None:
        self.received: list[tuple[str, int, Message]] = []
        self.react: Callable[[str, Message], None] = lambda peer, message: None
        self.server = RpcServer(sender="worker", incarnation=incarnation, on_message=self._receive)

    def _receive(self, peer: str, incarnation: int, message: Message) -> None:
        self.received.append((peer, incarnation, message))
        self.react(peer, message)

    def messages_of(self, peer: str) -> list[Message]:
        return [message for sender, _, message in self.received if sender == peer]


class Client:
    """A connection that records what it is sent, and may react to it."""

    def __init__(self, address: str, sender: str = "router", incarnation: int = 1) -> None:
        self.envelopes: list[Envelope] = []
        self.react: Callable[[Envelope], None] = lambda envelope: None
        self.connection = RpcConnection(
            address, sender=sender, incarnation=incarnation, on_message=self._receive
        )

    def _receive(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)
        self.react(envelope)

    @property
    def messages(self) -> list[Message]:
        return [envelope.message for envelope in self.envelopes]


class Cluster:
    """Opens servers and connections and closes what a test leaves open."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._clients: list[Client] = []

    async def worker(self, address: str = LOCALHOST, incarnation: int = 1) -> tuple[Worker, str]:
        worker = Worker(incarnation)
        self._workers.append(worker)
        return worker, await worker.server.bind(address)

    async def worker_again(self, address: str, incarnation: int) -> Worker:
        """At an address that was just given up: its socket closes in the background."""
        while True:
            try:
                return (await self.worker(address, incarnation))[0]
            except RpcError:
                await asyncio.sleep(0.01)

    def client(self, address: str, sender: str = "router", incarnation: int = 1) -> Client:
        self._clients.append(Client(address, sender, incarnation))
        return self._clients[-1]

    async def known_client(
        self, worker: Worker, address: str, sender: str = "router", incarnation: int = 1
    ) -> Client:
        """A client that the worker has heard of."""
        client = self.client(address, sender, incarnation)
        num_received = len(worker.received)
        client.connection.send(numbered(-1))
        await until(lambda: len(worker.received) > num_received, f"the first message of {sender}")
        worker.received.clear()
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.connection.close()
        for worker in self._workers:
            await worker.server.close()


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
        request_id="söme/id",
        attempt=2,
        prompt_token_ids=[0, 49151],
        sampling=sampling,
        output_token_ids=[4],
        prefill_worker="p0",
        cache_salt="tenant",
        deadline=1_700_000_000.25,
    )
    prefill = Prefill(
        request_id="r", attempt=1, prompt_token_ids=[1], sampling=sampling, first_block=3, block_ids=[9, 4]
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
        request_id="long",
        attempt=1,
        prompt_token_ids=list(range(500_000)),
        sampling=SamplingParams(max_tokens=1, seed=0),
    )
    client.connection.send(request)
    await until(lambda: bool(client.envelopes), "the snapshot")
    assert worker.messages_of("router") == [request]
    assert client.messages == [snapshot]


async def test_each_peer_gets_its_own_answers(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    clients = {
        name: await cluster.known_client(worker, address, sender=name) for name in ("a", "b", "c", "d")
    }
    for number in range(100):
        for index, name in enumerate(clients):
            assert worker.server.send(name, numbered(index * 1000 + number))
    for index, client in enumerate(clients.values()):
        await until(lambda client=client: len(client.envelopes) == 100, "the answers")
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
    most = max(later - earlier for earlier, later in zip(seen, seen[1:], strict=False))
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
        client.connection.send(numbered(5))  # what went into the dying connection is lost: delivery is at most once
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


# --- full queues -------------------------------------------------------------------------------------------


async def test_a_full_queue_is_an_error_and_loses_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/w"
    client = cluster.client(address)
    for number in range(rpc.MAX_QUEUED_MESSAGES):
        client.connection.send(numbered(number))
    for _ in range(3):
        with pytest.raises(RpcOverloadedError, match=f"cannot send to {address}"):
            client.connection.send(numbered(-1))
    worker, _ = await cluster.worker(address)
    await until(lambda: len(worker.received) >= rpc.MAX_QUEUED_MESSAGES, "all that were accepted")
    client.connection.send(numbered(rpc.MAX_QUEUED_MESSAGES))
    await until(lambda: len(worker.received) > rpc.MAX_QUEUED_MESSAGES, "one more")
    assert numbers(worker.messages_of("router")) == list(range(rpc.MAX_QUEUED_MESSAGES + 1))


async def test_a_peer_that_does_not_read_blocks_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_QUEUED_MESSAGES", 20)
    worker, address = await cluster.worker()
    reader = await cluster.known_client(worker, address, sender="reader")
    sleeper = zmq.Context.instance().socket(zmq.DEALER)
    try:
        sleeper.setsockopt(zmq.RCVHWM, 1)
        sleeper.connect(address)
        sleeper.send(msgspec.msgpack.encode(Envelope("sleeper", 1, numbered(0))))
        await until(lambda: len(worker.received) == 1, "the sleeper's message")
        large = KvEvents(sequence=1, stored=[bytes(1 << 20)])
        num_accepted = 0
        while worker.server.send("sleeper", large):
            num_accepted += 1
            assert num_accepted < 1000, "the queue has no bound"
            await asyncio.sleep(0)
        assert worker.server.num_undeliverable == 1
        assert worker.server.send("reader", numbered(1))
        await until(lambda: bool(reader.envelopes), "the reader's message")
    finally:
        sleeper.close(linger=0)


# --- garbage -----------------------------------------------------------------------------------------------


async def test_malformed_messages_are_counted_and_dropped(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    good = msgspec.msgpack.encode(Envelope("raw", 1, numbered(1)))
    nested = b"\x93\xa3raw\x01\x82\xa4type\xa6cancel\xa1z" + b"\x91" * 100_000
    garbage = [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        good[:-1],
        good + b"\x00",
        msgspec.msgpack.encode(["raw", 1, {"type": "no such message"}]),
        msgspec.msgpack.encode(["raw", "1", {"type": "cancel", "request_id": "r", "attempt": 1}]),
        msgspec.msgpack.encode(["raw", 1, {"type": "cancel", "request_id": "r"}]),
        msgspec.msgpack.encode(["raw", 1]),
        nested,
    ]
    raw = zmq.Context.instance().socket(zmq.DEALER)
    try:
        raw.connect(address)
        for payload in garbage:
            raw.send(payload)
        raw.send(good)
        await until(lambda: bool(worker.received), "the good message")
    finally:
        raw.close(linger=0)
    assert worker.server.num_malformed == len(garbage)
    assert worker.received == [("raw", 1, numbered(1))]


async def test_mutated_messages_are_handled_or_counted(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    worker, address = await cluster.worker()
    rng = random.Random(5)
    good = msgspec.msgpack.encode(
        Envelope(
            "raw",
            1,
            Generate(
                request_id="r",
                attempt=1,
                prompt_token_ids=[1, 300, 70_000],
                sampling=SamplingParams(max_tokens=3, seed=1, temperature=0.5),
            ),
        )
    )
    raw = zmq.Context.instance().socket(zmq.DEALER)
    try:
        raw.connect(address)
        for _ in range(3000):
            mutated = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            raw.send(mutated)
        raw.send(msgspec.msgpack.encode(Envelope("last", 1, numbered(9))))
        await until(lambda: bool(worker.messages_of("last")), "the last message")
    finally:
        raw.close(linger=0)
    server = worker.server
    assert len(worker.received) + server.num_malformed + server.num_stale == 3001
    assert server.num_malformed > 0
    assert caplog.text == "", "no handler has failed"


async def test_a_connection_counts_malformed_answers(cluster: Cluster) -> None:
    raw = zmq.Context.instance().socket(zmq.ROUTER)
    try:
        port = raw.bind_to_random_port("tcp://127.0.0.1")
        client = cluster.client(f"tcp://127.0.0.1:{port}")
        client.connection.send(numbered(1))
        await until(lambda: bool(int(raw.EVENTS) & zmq.POLLIN), "the client's message")
        identity, _ = raw.recv_multipart()
        raw.send_multipart([identity, b"\x00nonsense"])
        raw.send_multipart([identity, msgspec.msgpack.encode(Envelope("raw", 1, numbered(2)))])
        await until(lambda: bool(client.envelopes), "the good message")
    finally:
        raw.close(linger=0)
    assert client.connection.num_malformed == 1
    assert numbers(client.messages) == [2]


async def test_a_failing_handler_is_logged_and_the_next_message_comes(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker, address = await cluster.worker()
    client = await cluster.known_client(worker, address)

    def fail_once(peer: str, message: Message) -> None:
        if len(worker.received) == 1:
            raise RuntimeError("a broken handler")

    worker.react = fail_once
    client.connection.send(numbered(1))
    client.connection.send(numbered(2))
    await until(lambda: len(worker.received) == 2, "the second message")
    assert "a broken handler" in caplog.text


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
