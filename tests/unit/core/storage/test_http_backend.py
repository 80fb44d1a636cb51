"""The remote tier over REST, against scripted answers: how many records it asks for at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
from lmcache_core.record import Chunk
from lmcache_core.storage.remote.base import RemoteOptions
from lmcache_core.storage.remote.http import BATCH_KEYS, FEW_KEYS, LARGE_RECORD_BYTES, HttpBackend
from lmcache_core.testing.chunks import make_chunk, make_key

from tests.fixtures.wire import Arena

NUM_KEYS = 2 * BATCH_KEYS


class Server:
    """Has every chunk, all of one size."""

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.asked: list[int] = []
        self._names = {make_key(i).key.to_url(): i for i in range(NUM_KEYS)}

    def answer(self, request: httpx.Request) -> httpx.Response:
        names = [self._names[key] for key in msgspec.json.decode(request.content)["keys"]]
        self.asked.append(len(names))
        return httpx.Response(200, content=self._records(names))

    async def _records(self, names: list[int]) -> AsyncIterator[bytes]:
        for name in names:
            chunk = make_chunk(name, payload=bytes(self.payload_bytes))
            yield chunk.head + bytes(chunk.memory.byte_array)


async def read(backend: HttpBackend, num_keys: int, arena: Arena) -> None:
    for result in await backend.batched_get([make_key(i) for i in range(num_keys)], arena):
        assert isinstance(result, Chunk)
        result.release()


async def test_few_large_records_are_asked_for_at_once_and_many_small_ones() -> None:
    server = Server(100)
    backend = HttpBackend("http://test", RemoteOptions(), httpx.MockTransport(server.answer))
    await backend.open()
    arena = Arena(NUM_KEYS << 12)
    await read(backend, FEW_KEYS + BATCH_KEYS + 1, arena)
    assert server.asked == [
        FEW_KEYS,
        BATCH_KEYS,
        1,
    ], "until it has seen one, it takes records for large"
    server.asked.clear()
    await read(backend, NUM_KEYS, arena)
    assert server.asked == [BATCH_KEYS, BATCH_KEYS]
    server.asked.clear()
    server.payload_bytes = LARGE_RECORD_BYTES
    large = Arena(64 << 20)
    await read(backend, 1, large)
    await read(backend, 2 * FEW_KEYS, large)
    assert server.asked == [1, FEW_KEYS, FEW_KEYS]
    await backend.close()
