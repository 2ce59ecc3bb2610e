"""What a process publishes about itself when it registers."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from cluster.kv_layout import KvLayout

PROTOCOL_VERSION = 4  # raised when a message changes meaning; unequal versions are never paired

_ADDRESS_END = 1 << 62

Role = Literal["prefill", "decode", "both"]


def takes_prefills(role: Role) -> bool:
    """Whether a worker that advertises ``role`` computes prompts for decode workers."""
    return role != "decode"


def takes_requests(role: Role) -> bool:
    """Whether a worker that advertises ``role`` takes requests from routers and generates their answers."""
    return role != "prefill"


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which model a worker runs. Equal fingerprints mean interchangeable KV blocks (given equal layouts)."""

    name: str  # as the API serves it
    source: str  # a path or hub id the router can load the tokenizer from
    fingerprint: str  # sha256 over the weights' headers and sizes, hex
    dtype: str  # "float32" | "float16" | "bfloat16"
    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kernels: str = ""  # which compute its linear layers, for people


class TransportEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a peer may write into one rank's KV cache."""

    kind: str  # "nixl"
    agent_name: str
    metadata: bytes
    base_address: int  # of block 0
    num_blocks: int
    memory: str = "DRAM"  # NIXL segment type: "DRAM" | "VRAM"
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of one worker. A restarted worker is another peer."""

    worker_id: str
    incarnation: int


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's registration.

    Raises ``ValueError`` where the endpoints are not one per rank, of one kind, each with a KV cache that
    memory can hold: peers compute addresses from them.
    """

    id: str
    incarnation: int  # larger after each restart; time.time_ns() at start
    role: Role  # what it takes now; every worker can take either, see ``role_epoch``
    pid: int
    host: str
    address: str  # where it takes messages; see check_address
    metrics_address: str  # http URL of its Prometheus endpoint, "" if none
    model: ModelIdentity
    kv_layout: KvLayout
    endpoints: tuple[TransportEndpoint, ...]  # by rank
    role_epoch: int = 0  # counts the changes of ``role`` in this incarnation
    process: str = ""  # cluster.process_identity.own_process()
    protocol_version: int = PROTOCOL_VERSION
    started_at: float = 0.0  # unix seconds

    def __post_init__(self) -> None:
        num_ranks = self.kv_layout.tp_size
        if len(self.endpoints) != num_ranks:
            raise ValueError(f"{self.id} has {len(self.endpoints)} transport endpoints for {num_ranks} ranks")
        kinds = {endpoint.kind for endpoint in self.endpoints}
        if len(kinds) > 1:
            raise ValueError(f"{self.id} has endpoints of several transports: {', '.join(sorted(kinds))}")
        for rank, endpoint in enumerate(self.endpoints):
            end = endpoint.base_address + endpoint.num_blocks * self.kv_layout.block_bytes
            if endpoint.base_address < 1 or endpoint.num_blocks < 1 or end > _ADDRESS_END:
                raise ValueError(
                    f"rank {rank} of {self.id} has {endpoint.num_blocks} KV blocks at address "
                    f"{endpoint.base_address}, which no memory has"
                )

    @property
    def transport(self) -> str:
        """By what its peers write, e.g. ``"nixl"``."""
        return self.endpoints[0].kind


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One router's registration."""

    id: str
    incarnation: int
    pid: int
    host: str
    address: str  # http URL
    protocol_version: int = PROTOCOL_VERSION
    started_at: float = 0.0


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Everyone in the cluster at one moment, in the order of their ids."""

    workers: tuple[WorkerRecord, ...] = ()
    routers: tuple[RouterRecord, ...] = ()


_COMPATIBILITY = ("protocol version", "model fingerprint", "dtype", "KV layout", "transport")


def compatibility_key(record: WorkerRecord) -> tuple[object, ...]:
    """Equal for workers that can hand over KV blocks to each other, and only for those."""
    return (
        record.protocol_version,
        record.model.fingerprint,
        record.model.dtype,
        record.kv_layout,
        record.transport,
    )


def incompatibility(one: WorkerRecord, other: WorkerRecord) -> str | None:
    """Why two workers cannot hand over KV blocks to each other; None if they can."""
    keys = compatibility_key(one), compatibility_key(other)
    for what, mine, theirs in zip(_COMPATIBILITY, *keys, strict=True):
        if mine != theirs:
            return f"{what} differs: {one.id} has {mine}, {other.id} has {theirs}"
    return None


def check_address(address: str) -> None:
    """Raises ValueError where a worker's address is neither ``tcp://IP:port`` nor ``ipc://path``.

    A host name is none: ZeroMQ would look it up in the one thread that moves everybody's messages.
    """
    try:
        parts = urlsplit(address)
        if parts.scheme == "ipc" and address != "ipc://":
            return
        if parts.scheme != "tcp" or not parts.port or parts.path or parts.query or parts.fragment:
            raise ValueError
        ip_address(parts.hostname or "")
    except ValueError:
        raise ValueError(f"{address!r} is no address of a worker, like tcp://192.0.2.1:5701") from None
