"""A process with an RPC server that prints its address and echoes what it is sent."""

from __future__ import annotations

import asyncio
import sys

from cluster.messages import Message
from cluster.rpc import RpcServer


async def serve(address: str) -> None:
    def echo(peer: str, incarnation: int, message: Message) -> None:
        server.send(peer, message)

    server = RpcServer(sender="worker", incarnation=1, on_message=echo)
    print(await server.bind(address), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
