"""Payloads go from the socket into the arena and from the arena into the socket, with nothing in
between.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import pytest
import uvloop
from lmcache_core.memory import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk

from tests.fixtures.wire import MemoryStore, client_of, serving
from tests.suites.chunks import make_chunk

NUM_CHUNKS = 3
PAYLOAD_BYTES = 8 << 20
MAX_EXTRA_BYTES = 512 << 10
"""Heads, frames, the staging buffers and tasks of both sides; one payload is 16 times as large."""
ASYNCIO_SLICE_BYTES = 1 << 20
"""What asyncio before Python 3.12 copies of a write that the kernel does not take at once: one
slice of ours.
"""


async def move(arena: ArenaAllocator) -> int:
    """Put and get everything, server and client in one process; the most memory that Python has
    had for it meanwhile.
    """

    def allocate(num_bytes: int) -> MemoryObj | None:
        return arena.allocate((num_bytes,), None)

    store = MemoryStore(NUM_CHUNKS * (PAYLOAD_BYTES + 4096))
    payload = bytes(range(256)) * (PAYLOAD_BYTES // 256)
    chunks = [make_chunk(i, payload=payload) for i in range(NUM_CHUNKS)]
    async with serving(store) as server, client_of(server.port, timeout_s=60) as client:
        await client.ping()
        tracemalloc.start()
        try:
            assert await client.put(chunks) == [True] * NUM_CHUNKS
            results = await client.get([chunk.key for chunk in chunks], allocate)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for result in results:
            assert isinstance(result, Chunk)
            assert result.memory.byte_array == payload
            result.release()
    return peak


@pytest.mark.parametrize(
    ("new_loop", "max_extra_bytes"),
    [
        (uvloop.new_event_loop, MAX_EXTRA_BYTES),
        (asyncio.new_event_loop, MAX_EXTRA_BYTES + 2 * ASYNCIO_SLICE_BYTES),
    ],
    ids=["uvloop", "asyncio"],
)
def test_no_payload_is_copied(
    new_loop: Callable[[], asyncio.AbstractEventLoop], max_extra_bytes: int
) -> None:
    arena = ArenaAllocator.anonymous(NUM_CHUNKS * (PAYLOAD_BYTES + 4096))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        extra = runner.run(move(arena))
    assert extra < max_extra_bytes, (
        f"{extra >> 10} KiB for {NUM_CHUNKS * PAYLOAD_BYTES >> 10} KiB of payload"
    )
    assert arena.used_bytes == 0
