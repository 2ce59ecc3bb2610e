"""Messages between processes: msgspec structs in MessagePack over ZeroMQ.

A worker binds a ROUTER socket (``RpcServer``); routers and decode workers connect DEALER sockets to it
(``RpcConnection``), and answers go back over the same connection. Neither side ever blocks: a full queue is
an error for the one message. Delivery is in order per connection and at most once; what a lost peer means for
a request is decided by the registry's lease, not by the socket.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from cluster.errors import LeadoutError
from cluster.malformed import MalformedMessage, identify
from cluster.members import WorkerRecord, check_address
from cluster.messages import Envelope, Message
from cluster.problem_log import ProblemLog

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000  # per connection and direction
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_HEARTBEAT_MS = 1000  # a peer that vanished without closing its connection is noticed after the timeout
_HEARTBEAT_TIMEOUT_MS = 5000
_CLOSE_LINGER_MS = 200
_MAX_MESSAGES_PER_TURN = 64  # then other tasks of the loop get their turn
_MAX_SOCKETS = 65_535  # ZeroMQ's 1023 would be used up by 341 connections of three sockets each

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class RpcError(LeadoutError):
    """A message could not be handed to the network."""


class RpcOverloadedError(RpcError):
    """The connection's queue is full or the connection is closed; the message was not sent."""


class MessageEncodingError(RpcError):
    """A message has a value that the wire format cannot carry; no peer could be sent it."""


class ZmqNetwork:
    """See ``cluster.network.Network``: what one process sends carries its id and incarnation."""

    def __init__(self, sender: str, incarnation: int) -> None:
        self._sender = sender
        self._incarnation = incarnation

    def listen(
        self,
        on_message: Callable[[str, int, Message], None],
        on_malformed: Callable[[str, int, MalformedMessage], None] = lambda peer, incarnation, message: None,
    ) -> RpcServer:
        """See Network."""
        return RpcServer(
            sender=self._sender,
            incarnation=self._incarnation,
            on_message=on_message,
            on_malformed=on_malformed,
        )

    def connect(
        self,
        worker: WorkerRecord,
        on_message: Callable[[Envelope], None],
        on_disconnected: Callable[[], None],
    ) -> RpcConnection:
        """See Network."""
        return RpcConnection(
            worker.address,
            sender=self._sender,
            incarnation=self._incarnation,
            on_message=on_message,
            on_disconnected=on_disconnected,
        )


class RpcServer:
    """A worker's side: receives from many peers and answers each of them. Lives in one asyncio loop.

    A peer is known by the ``sender`` of its envelopes. Envelopes of an older incarnation than the newest seen
    from that sender are dropped and counted in ``num_stale``, malformed ones in ``num_malformed``.
    """

    def __init__(
        self,
        *,
        sender: str,
        incarnation: int,
        on_message: Callable[[str, int, Message], None],
        on_malformed: Callable[[str, int, MalformedMessage], None] = lambda peer, incarnation, message: None,
    ) -> None:
        """``on_message(peer, peer's incarnation, message)`` runs in the loop; its exceptions are logged.

        ``on_malformed`` is called for a message that cannot be read, where it says at least whose request it
        is about, so that its sender can be told.
        """
        self._sender = sender
        self._incarnation = incarnation
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._socket: _AsyncSocket | None = None
        self._routes: dict[str, tuple[int, bytes]] = {}  # peer → (incarnation, ZeroMQ identity)
        self._problems = ProblemLog(logger)
        self.num_stale = 0
        self.num_malformed = 0
        self.num_undeliverable = 0

    async def bind(self, address: str) -> str:
        """Start to listen at ``tcp://host:port`` (port 0: any) or ``ipc://path``; returns the real address.

        Raises RpcError if the address cannot be bound.
        """
        socket = _open_socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a vanished peer is an error, not silence
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if address.endswith(":0"):
            address = address.removesuffix("0") + "*"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise RpcError(f"cannot listen at {address}: {error}") from error
        self._socket = _AsyncSocket(socket, self._receive, self._problems)
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message for ``peer``; False if it never spoke to us, is gone, or does not keep up."""
        route = self._routes.get(peer)
        if route is None or self._socket is None:
            self.num_undeliverable += 1
            return False
        payload = _encoder.encode(Envelope(self._sender, self._incarnation, message))
        try:
            self._socket.send([route[1], payload])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                self._problems.report(("send", peer), "cannot send to %s: %s", peer, error)
            self.num_undeliverable += 1
            return False
        return True

    def forget(self, peer: str) -> None:
        """Drop what is known about a peer that left the cluster."""
        self._routes.pop(peer, None)

    async def close(self) -> None:
        """Stop to listen. What was queued is still delivered for a moment."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self, frames: list[bytes]) -> None:
        received = _decode(frames[-1], self._problems)
        if received is None:
            self.num_malformed += 1
            return
        sender, incarnation = received.sender, received.incarnation
        known = self._routes.get(sender)
        if known is not None and incarnation < known[0]:
            self.num_stale += 1
            message = "dropped a message of an older incarnation of %s"
            self._problems.report(("stale", sender), message, sender, level=logging.INFO)
            return
        self._routes[sender] = (incarnation, frames[0])
        if isinstance(received, Envelope):
            self._on_message(sender, incarnation, received.message)
        else:
            self.num_malformed += 1
            self._on_malformed(sender, incarnation, received)


class RpcConnection:
    """A client's side: one connection to one worker. Reconnects by itself. Lives in one asyncio loop."""

    def __init__(
        self,
        address: str,
        *,
        sender: str,
        incarnation: int,
        on_message: Callable[[Envelope], None],
        on_disconnected: Callable[[], None] = lambda: None,
    ) -> None:
        """Connects in the background. The callbacks run in the loop; their exceptions are logged.

        ``on_disconnected``: an established connection broke, because the process died, or because nothing
        came from it for the heartbeat's timeout. What was sent may be lost. It may come back.

        Raises RpcError where the address is none, or where no more sockets can be opened.
        """
        self._address = address
        self._sender = sender
        self._incarnation = incarnation
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self.num_malformed = 0
        self._problems = ProblemLog(logger)
        try:
            check_address(address)
            self._dealer = _open_socket(zmq.DEALER, address)
        except (ValueError, zmq.ZMQError) as error:
            raise RpcError(f"cannot connect: {error}") from error
        try:
            self._dealer.connect(address)
            monitor = self._dealer.get_monitor_socket(
                zmq.EVENT_DISCONNECTED, f"inproc://monitor-{secrets.token_hex(8)}"
            )
        except zmq.ZMQError as error:
            self._dealer.close(linger=0)
            raise RpcError(f"cannot connect to {address}: {error}") from error
        self._monitor = _AsyncSocket(monitor, self._on_event, self._problems)
        self._socket: _AsyncSocket | None = _AsyncSocket(self._dealer, self._receive, self._problems)

    def send(self, message: Message) -> None:
        """Queue a message. Raises RpcOverloadedError if the queue is full or the connection closed, and
        MessageEncodingError for a message that no peer could be sent.
        """
        if self._socket is None:
            raise RpcOverloadedError(f"the connection to {self._address} is closed")
        try:
            payload = _encoder.encode(Envelope(self._sender, self._incarnation, message))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise MessageEncodingError(f"{type(message).__name__} cannot be encoded: {error}") from error
        try:
            self._socket.send([payload])
        except zmq.ZMQError as error:
            raise RpcOverloadedError(f"cannot send to {self._address}: {error}") from error

    def close(self) -> None:
        """Disconnect. What was queued is still delivered for a moment."""
        if self._socket is not None:
            self._dealer.disable_monitor()  # first: events without a reader would block
            self._monitor.close()
            self._socket.close()
            self._socket = None

    def _on_event(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
            self._on_disconnected()

    def _receive(self, frames: list[bytes]) -> None:
        envelope = _decode(frames[-1], self._problems)
        if isinstance(envelope, Envelope):
            self._on_message(envelope)
        else:
            self.num_malformed += 1


class _AsyncSocket:
    """A ZeroMQ socket in an asyncio loop, with sends that do not wait.

    ``zmq.asyncio`` has no such send. The socket's file descriptor is edge-triggered, and any operation may
    consume the edge, so after each send the events are looked at again.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[bytes]], None],
        problems: ProblemLog,
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._problems = problems
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._drain)
        self._drain_is_scheduled = False
        self._schedule_drain()

    def send(self, frames: list[bytes]) -> None:
        """Raises zmq.ZMQError."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        finally:
            self._schedule_drain()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=_CLOSE_LINGER_MS)

    def _is_readable(self) -> bool:
        return bool(int(self._socket.EVENTS) & zmq.POLLIN)

    def _schedule_drain(self) -> None:
        if not self._drain_is_scheduled:
            self._drain_is_scheduled = True
            self._loop.call_soon(self._drain_again)

    def _drain_again(self) -> None:
        self._drain_is_scheduled = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(_MAX_MESSAGES_PER_TURN):
            if self._socket.closed or not self._is_readable():  # a handler may close the socket
                return
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
            try:
                self._on_frames(frames)
            except Exception as error:
                key = ("handler", type(error).__name__)
                self._problems.report(key, "handling a message failed", level=logging.ERROR, error=error)
        self._schedule_drain()


def _decode(payload: bytes, problems: ProblemLog) -> Envelope | MalformedMessage | None:
    """The envelope, or what can still be said of one that is malformed."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:  # the latter: absurdly nested
        problems.report("malformed", "dropped a malformed message of %d bytes: %s", len(payload), error)
        return identify(payload, str(error))


def _open_socket(kind: int, address: str) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)  # has an effect before the first socket
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.LINGER, 0)
    return socket
