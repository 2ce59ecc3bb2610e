"""A worker's transport in a process of its own: reads commands as JSON lines, answers with JSON lines.

``python -m tests.kv_transfer.nixl_peer ID ROLE INCARNATION``. ``fill`` fills block ``b`` with the byte ``b``
plus its seed.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import time
from typing import Any

import msgspec

from cluster.kv_layout import KvLayout
from cluster.members import WorkerRecord
from kv_transfer.create_transport import create_transport
from kv_transfer.transport import Peer
from tests.kv_transfer.peers import record

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
NUM_BLOCKS = 64


def main() -> None:
    worker_id, role, incarnation = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cache = ctypes.create_string_buffer(NUM_BLOCKS * LAYOUT.block_bytes)
    transport = create_transport(
        kind="nixl",
        backends=["UCX"],
        write_timeout_ms=3000,
        own=Peer(worker_id, incarnation),
        base_address=ctypes.addressof(cache),
        num_blocks=NUM_BLOCKS,
        layout=LAYOUT,
    )
    notifications: list[str] = []
    transport.on_notification(lambda payload: notifications.append(payload.decode()))
    own = record(worker_id, role, incarnation, endpoint=transport.endpoint)  # type: ignore[arg-type]
    own = msgspec.structs.replace(own, kv_layout=LAYOUT)
    answer(record=base64.b64encode(msgspec.msgpack.encode(own)).decode())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(**run(command, transport, cache, notifications))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")
        if command["do"] == "close":
            return


def run(command: dict[str, Any], transport: Any, cache: Any, notifications: list[str]) -> dict[str, Any]:
    what = command["do"]
    size = LAYOUT.block_bytes
    if what == "add":
        data = base64.b64decode(command["record"])
        transport.add_peer(msgspec.msgpack.decode(data, type=WorkerRecord)).result(20)
    elif what == "remove":
        transport.remove_peer(Peer(*command["peer"])).result(20)
    elif what == "fill":
        for block in range(1, NUM_BLOCKS):
            value = (block + command["seed"]) % 256
            ctypes.memset(ctypes.addressof(cache) + block * size, value, size)
    elif what == "write":
        future = transport.write_blocks(Peer(*command["peer"]), command["local"], command["remote"])
        stats = future.result(20)
        return {"num_bytes": stats.num_bytes, "num_descriptors": stats.num_descriptors}
    elif what == "notify":
        transport.notify(Peer(*command["peer"]), command["payload"].encode()).result(20)
    elif what == "read":  # the distinct bytes of each block
        blocks = [cache.raw[block * size : (block + 1) * size] for block in command["blocks"]]
        return {"blocks": [sorted(set(block)) for block in blocks]}
    elif what == "expect":
        transport.expect_traffic("test")
    elif what == "notifications":
        give_up_at = time.monotonic() + 10
        while len(notifications) < command["count"] and time.monotonic() < give_up_at:
            time.sleep(0.005)
        return {"notifications": notifications[:]}
    elif what == "idle":
        before = time.process_time()
        time.sleep(command["seconds"])
        return {"cpu_share": (time.process_time() - before) / command["seconds"], "pid": os.getpid()}
    elif what == "close":
        transport.close()
    return {}


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
