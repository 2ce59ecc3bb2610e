"""Makes the transport that the configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.kv_layout import KvLayout
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import Peer, Transport


def create_transport(
    *,
    kind: str,
    backends: Sequence[str],
    write_timeout_ms: int,
    own: Peer,
    base_address: int,
    num_blocks: int,
    layout: KvLayout,
    memory: str = "DRAM",
    device_id: int = 0,
) -> Transport:
    """A transport over the KV cache of ``num_blocks`` blocks at ``base_address``.

    The agent's name holds the incarnation, so that a restarted worker is never taken for its former life.
    Raises ValueError for an unknown ``kind``, TransportUnavailableError where it cannot run.
    """
    if kind != "nixl":
        raise ValueError(f"transport is {kind!r}; the only one between processes is 'nixl'")
    return NixlTransport(
        agent_name=f"{own.worker_id}@{own.incarnation}",
        base_address=base_address,
        layout=layout,
        num_blocks=num_blocks,
        memory=memory,
        device_id=device_id,
        backends=backends,
        local_id=(own.worker_id, own.incarnation),
        transfer_timeout_s=write_timeout_ms / 1000,
    )
