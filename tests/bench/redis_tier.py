"""The Redis tier against a raw socket: the same bytes to a real server on loopback, SET and GET one
by one, in turn with ours.
"""

from __future__ import annotations

import asyncio

from lmcache_core.storage.remote import create_remote_backend

from tests.bench.chunk_set import ChunkSet
from tests.bench.limits import redis_limits
from tests.bench.measure import ROUNDS, Figure, in_turn
from tests.bench.shape import TOTAL_BYTES
from tests.fixtures.redis_server import running_redis

TIMEOUT_S = 120.0
STORE_NOTE = "the digest of a chunk is computed before it is sent"
RETRIEVE_NOTE = "digests are checked while the next chunk is read"


def redis_figures(rounds: int = ROUNDS) -> list[Figure]:
    """Store and retrieve; the limit neither copies nor digests."""
    chunks = ChunkSet()
    with running_redis() as server, asyncio.Runner() as runner:
        set_raw, get_raw = redis_limits(server.port)
        backend = create_remote_backend(server.url, timeout_s=TIMEOUT_S)
        runner.run(backend.open())

        def put(turn: int) -> None:
            if not all(runner.run(backend.batched_put(chunks.chunks(0)))):
                raise AssertionError("a chunk was not stored")

        def get(turn: int) -> None:
            chunks.take(runner.run(backend.batched_get(chunks.keys(0), chunks.allocate)))

        stored = in_turn(put, lambda turn: set_raw(), rounds=rounds)
        retrieved = in_turn(get, lambda turn: get_raw(), rounds=rounds)
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
        Figure(f"limit: raw {command}", TOTAL_BYTES, beside),
        note,
        beside,
    )
