"""One end of the transfer that ``leadout doctor`` measures, in a process of its own.

``python -m leadout.doctor.transfer_peer target|source``: the target offers memory, the source writes it.
"""

from __future__ import annotations

import base64
import ctypes
import sys
import time
from typing import Any

import msgspec

from cluster.kv_layout import KvLayout
from cluster.members import ModelIdentity, Peer, Role, TransportEndpoint, WorkerRecord
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import TransferError, Transport, TransportUnavailableError
from leadout.doctor.child import read_message, send_answer

_LAYOUT = KvLayout(num_layers=8, num_kv_heads=8, head_dim=64, block_size=32, dtype="float32")
_BLOCK_BYTES = _LAYOUT.block_bytes  # 1 MiB
_WAIT_S = 15.0
_ROUNDS = 7


def main() -> int:
    """Play the role that the command line names. Exit status 0, or 1 after an answer with ``error``."""
    role = sys.argv[1]
    settings = read_message()
    try:
        if role == "target":
            _target(settings)
        else:
            send_answer(_source(settings))
    except (TransferError, TransportUnavailableError, TimeoutError) as error:
        send_answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _target(settings: dict[str, Any]) -> None:
    """Offer memory until told to stop; then say whether what arrived is right."""
    num_blocks = settings["num_blocks"] + 1  # block 0 takes the warm-up
    cache = _present_memory(num_blocks * _BLOCK_BYTES)
    transport = _transport("doctor-target", cache, num_blocks, settings)
    transport.expect_traffic("doctor")
    record = _record("doctor-target", "decode", transport.endpoint)
    send_answer({"record": base64.b64encode(msgspec.msgpack.encode(record)).decode()})
    read_message()
    expected = _content(settings["num_blocks"])
    arrived = ctypes.string_at(ctypes.addressof(cache) + _BLOCK_BYTES, len(expected))
    send_answer({"intact": arrived == expected})
    transport.close()


def _source(settings: dict[str, Any]) -> dict[str, Any]:
    """Write all blocks to the target, several times, in turn with copies of the same bytes to own memory."""
    num_blocks = settings["num_blocks"] + 1
    content = _content(settings["num_blocks"])
    cache = _present_memory(num_blocks * _BLOCK_BYTES)
    ctypes.memmove(ctypes.addressof(cache) + _BLOCK_BYTES, content, len(content))
    copy = _present_memory(len(cache))
    transport = _transport("doctor-source", cache, num_blocks, settings)
    record = msgspec.msgpack.decode(base64.b64decode(settings["record"]), type=WorkerRecord)
    target = Peer(record.id, record.incarnation)
    transport.add_peer(record).result(_WAIT_S)
    blocks = range(1, num_blocks)
    written_s, copied_s = [], []
    for _ in range(_ROUNDS):
        stats = transport.write_blocks(target, blocks, blocks).result(_WAIT_S)
        written_s.append(stats.duration_ms / 1e3)
        started = time.perf_counter()
        ctypes.memmove(copy, cache, len(content))
        copied_s.append(time.perf_counter() - started)
    transport.close()
    # The fastest of several: whatever else the machine does only ever makes one slower.
    return {
        "num_bytes": len(content),
        "write_gbps": len(content) / min(written_s) / 1e9,
        "copy_gbps": len(content) / min(copied_s) / 1e9,
    }


def _transport(
    worker_id: str, cache: ctypes.Array[ctypes.c_char], num_blocks: int, settings: dict[str, Any]
) -> Transport:
    return NixlTransport(
        own=Peer(worker_id, 1),
        backends=settings["backends"],
        write_timeout_s=_WAIT_S,
        base_address=ctypes.addressof(cache),
        num_blocks=num_blocks,
        layout=_LAYOUT,
    )


def _record(worker_id: str, role: Role, endpoint: TransportEndpoint) -> WorkerRecord:
    """A registration as a worker has it; only its endpoint and layout matter to a transport."""
    model = ModelIdentity(
        name="none",
        source="none",
        fingerprint="none",
        dtype=_LAYOUT.dtype,
        max_model_len=1,
        vocab_size=1,
        eos_token_ids=(0,),
    )
    return WorkerRecord(
        id=worker_id,
        incarnation=1,
        role=role,
        pid=1,
        host="localhost",
        address="",
        metrics_address="",
        model=model,
        kv_layout=_LAYOUT,
        endpoints=(endpoint,),
    )


def _present_memory(num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory whose pages are all mapped, so that the first write is not slower than the others."""
    memory = ctypes.create_string_buffer(num_bytes)
    ctypes.memset(memory, 1, num_bytes)
    return memory


def _content(num_blocks: int) -> bytes:
    """What the source writes: every block begins with its number."""
    filling = bytes(range(251)) * (_BLOCK_BYTES // 251 + 1)
    return b"".join((b"%08d" % number + filling)[:_BLOCK_BYTES] for number in range(num_blocks))


if __name__ == "__main__":
    sys.exit(main())
