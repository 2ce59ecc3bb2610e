"""Messages over real sockets where they go wrong: full queues, peers that do not read, garbage."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from cluster import rpc
from cluster.messages import Cancel, Envelope, Generate, KvEvents, Message
from cluster.rpc import MessageEncodingError, RpcOverloadedError
from cluster.sampling_params import SamplingParams
from cluster.sequence_spec import RequestKey, SequenceSpec
from tests.cluster.rpc_cluster import Cluster, numbered, numbers, until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


@pytest.fixture
def raw() -> Iterator[zmq.Socket[bytes]]:
    """A peer that need not keep to the protocol. The test connects it."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    yield socket
    socket.close(linger=0)


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
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, raw: zmq.Socket[bytes]
) -> None:
    monkeypatch.setattr(rpc, "MAX_QUEUED_MESSAGES", 20)
    worker, address = await cluster.worker()
    reader = await cluster.known_client(worker, address, sender="reader")
    raw.setsockopt(zmq.RCVHWM, 1)
    raw.connect(address)
    raw.send(msgspec.msgpack.encode(Envelope("sleeper", 1, numbered(0))))
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


# --- garbage -----------------------------------------------------------------------------------------------


async def test_malformed_messages_are_counted_and_dropped(cluster: Cluster, raw: zmq.Socket[bytes]) -> None:
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
        msgspec.msgpack.encode(["raw", "1", {"type": "cancel", "key": RequestKey("r", 1)}]),
        msgspec.msgpack.encode(["raw", 1, {"type": "cancel", "key": ["r"]}]),
        msgspec.msgpack.encode(["raw", 1]),
        nested,
    ]
    raw.connect(address)
    for payload in garbage:
        raw.send(payload)
    raw.send(good)
    await until(lambda: bool(worker.received), "the good message")
    assert worker.server.num_malformed == len(garbage)
    assert worker.received == [("raw", 1, numbered(1))]


async def test_whose_request_a_malformed_message_is_about_is_told(
    cluster: Cluster, raw: zmq.Socket[bytes]
) -> None:
    worker, address = await cluster.worker()
    raw.connect(address)
    raw.send(msgspec.msgpack.encode(["raw", 2, {"type": "generate", "key": RequestKey("r", 1)}]))
    raw.send(msgspec.msgpack.encode(["raw", 1, {"type": "generate", "key": RequestKey("old", 1)}]))
    raw.send(msgspec.msgpack.encode(Envelope("raw", 2, numbered(1))))
    await until(lambda: bool(worker.received), "the good message")
    ((peer, incarnation, message),) = worker.malformed
    assert (peer, incarnation, message.kind, message.key.request_id) == ("raw", 2, "generate", "r")
    assert "spec" in message.reason
    assert (worker.server.num_malformed, worker.server.num_stale) == (1, 1)
    assert worker.server.send("raw", numbered(2)), "its sender can be answered"


async def test_a_message_that_no_wire_can_carry_is_the_sender_s_fault(cluster: Cluster) -> None:
    worker, address = await cluster.worker()
    client = cluster.client(address)
    with pytest.raises(MessageEncodingError, match="Cancel cannot be encoded"):
        client.connection.send(Cancel(key=RequestKey("r", 10**27)))
    client.connection.send(numbered(1))
    await until(lambda: bool(worker.received), "the next message")


async def test_mutated_messages_are_handled_or_counted(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, raw: zmq.Socket[bytes]
) -> None:
    caplog.set_level(logging.ERROR)
    worker, address = await cluster.worker()
    rng = random.Random(5)
    good = msgspec.msgpack.encode(
        Envelope(
            "raw",
            1,
            Generate(
                key=RequestKey("r", 1),
                spec=SequenceSpec(
                    prompt_token_ids=[1, 300, 70_000],
                    sampling=SamplingParams(max_tokens=3, seed=1, temperature=0.5),
                ),
            ),
        )
    )
    raw.connect(address)
    for _ in range(3000):
        mutated = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        raw.send(mutated)
    raw.send(msgspec.msgpack.encode(Envelope("last", 1, numbered(9))))
    await until(lambda: bool(worker.messages_of("last")), "the last message")
    server = worker.server
    assert len(worker.received) + server.num_malformed + server.num_stale == 3001
    assert server.num_malformed > 0
    assert caplog.text == "", "no handler has failed"


async def test_a_connection_counts_malformed_answers(cluster: Cluster) -> None:
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
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
