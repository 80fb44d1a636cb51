"""The Redis tier against plain redis-py: the same values to a real server on loopback, SET and
GET one by one, in turn with ours.
"""

from __future__ import annotations

import asyncio

from lmcache_core.record import Chunk
from lmcache_core.storage.remote import create_remote_backend

from tests.bench.chunk_set import ChunkSet
from tests.bench.measure import ROUNDS, Figure, in_turn
from tests.bench.shape import TOTAL_BYTES
from tests.fixtures.redis_server import running_redis

TIMEOUT_S = 120.0
STORE_NOTE = (
    "one copy of every byte into the socket; the digest of a chunk is computed before it is sent"
)
RETRIEVE_NOTE = (
    "the three copies of every byte that asyncio's stream and redis-py's parser make; our copy and"
    " digest are a tenth of it"
)


def redis_figures(rounds: int = ROUNDS) -> list[Figure]:
    """Store and retrieve; the limit is the sync client of redis-py, which neither copies nor
    digests.
    """
    chunks = ChunkSet()
    values = [_record(chunk) for chunk in chunks.chunks(0)]
    with running_redis() as server, server.client() as plain, asyncio.Runner() as runner:
        backend = create_remote_backend(server.url, timeout_s=TIMEOUT_S)
        runner.run(backend.open())

        def put(turn: int) -> None:
            if not all(runner.run(backend.batched_put(chunks.chunks(0)))):
                raise AssertionError("a chunk was not stored")

        def get(turn: int) -> None:
            chunks.take(runner.run(backend.batched_get(chunks.keys(0), chunks.allocate)))

        def set_raw(turn: int) -> None:
            for i, value in enumerate(values):
                plain.set(f"raw:{i}", value)

        def get_raw(turn: int) -> None:
            for i in range(len(values)):
                plain.get(f"raw:{i}")

        stored = in_turn(put, set_raw, rounds=rounds)
        retrieved = in_turn(get, get_raw, rounds=rounds)
        runner.run(backend.close())
    return [
        _figure("redis: store", stored, "SET", STORE_NOTE),
        _figure("redis: retrieve", retrieved, "GET", RETRIEVE_NOTE),
    ]


def _figure(
    name: str, seconds: tuple[tuple[float, ...], tuple[float, ...]], command: str, note: str
) -> Figure:
    mine, beside = seconds
    return Figure(
        name,
        TOTAL_BYTES,
        mine,
        Figure(f"limit: redis-py {command}", TOTAL_BYTES, beside),
        note,
        beside,
    )


def _record(chunk: Chunk) -> bytes:
    return chunk.head + bytes(chunk.memory.byte_array)
