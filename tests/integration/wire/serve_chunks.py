"""A server in a process of its own, to be killed: `serve_chunks.py <port> <num_chunks>
<payload_bytes>`. Prints its port.
"""

from __future__ import annotations

import asyncio
import sys

from lmcache_core.wire.server import LmServer

from tests.fixtures.wire import MemoryStore, anyone
from tests.suites.chunks import make_chunk


async def main(port: int, num_chunks: int, payload_bytes: int) -> None:
    store = MemoryStore(num_chunks * (payload_bytes + 4096))
    for i in range(num_chunks):
        chunk = make_chunk(i, payload=bytes([i]) * payload_bytes, allocate=store.arena)
        store.chunks[chunk.key] = chunk
    server = LmServer(store, anyone, port=port)
    await server.open()
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*(int(argument) for argument in sys.argv[1:4])))
