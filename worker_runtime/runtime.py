"""What a worker process gives its roles to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.members import Peer
from cluster.messages import Message
from cluster.network import Network
from engine.engine_commands import EngineCommands
from kv_transfer.peer_connections import PeerConnections
from kv_transfer.transport import Transport
from kv_transfer.verification import BlockVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRuntime:
    """One worker process's parts, shared by its roles. All but ``post`` belong to its event loop."""

    own: Peer
    block_size: int  # tokens
    lease_s: float  # who is not heard of for so long is given up
    heartbeat_s: float
    max_stall_s: float  # a process that stood still for longer may have been taken for dead
    clock: Clock
    engine: EngineCommands
    transport: Transport
    verifier: BlockVerifier
    peers: PeerConnections
    network: Network
    send: Callable[[str, Message], bool]  # answers a router or decode worker; False if it is gone
    post: Callable[[Callable[[], None]], None]  # runs a function in the event loop, from any thread
