"""Put a bounded load on a service that is running, and take everything away again.

`python -m tests.bench.load lm://HOST:65432` stores chunks in a cache_storage for at most half of
the time and fetches them at random; each that comes back is verified. `http://HOST:8081` is a
lookup service: a prefix is announced and looked up. All names are unique, and in the tenant of the
token; they displace others, so use a token of a tenant with a quota.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.names import MEMORY_TIER
from lmcache_core.record import UNSEALED_DIGEST, Chunk, raw_header
from lmcache_core.security import TokenFile
from lmcache_core.storage.remote import create_remote_backend

CALL_TIMEOUT_S = 10.0
CHUNKS_IN_A_CALL = 4
LEASE_MS = 600_000
SEEN_S = 5.0
"""Until a prefix that was announced must be found."""

Call = Callable[[], Awaitable[int | None]]
"""Returns the chunks that one call stored, fetched or found; None: there is nothing more to do."""


async def phase(name: str, call: Call, concurrency: int, seconds: float) -> float:
    """Make concurrent calls until there are no more or the time is over; print their figures.

    Returns:
        The seconds that it took.
    """
    begin = time.perf_counter()
    latencies: list[float] = []
    num_chunks = 0

    async def work() -> None:
        nonlocal num_chunks
        while (started := time.perf_counter()) < begin + seconds:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                done = await call()
            if done is None:
                return
            latencies.append(1e3 * (time.perf_counter() - started))
            num_chunks += done

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
    took_s = time.perf_counter() - begin
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    figures = f"p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms" if cuts else "no call"
    print(
        f"{name}: {len(latencies) / took_s:,.0f} calls/s, {num_chunks / took_s:,.0f} chunks/s,"
        f" {figures}"
    )
    return took_s


async def load_storage(url: str, token: TokenFile | None, given: argparse.Namespace) -> None:
    """Store, fetch and remove."""
    model = f"load/{secrets.token_hex(8)}"
    keys = [
        ChunkKey.of("default", CacheEngineKey("bench", model, 1, 0, f"{number:064x}"))
        for number in range(given.chunks)
    ]
    payload = os.urandom(given.size)
    begins = iter(range(0, given.chunks, CHUNKS_IN_A_CALL))
    stored: list[ChunkKey] = []
    chosen = random.Random(0)

    def chunk_of(key: ChunkKey) -> Chunk:
        header = raw_header(key.key, (given.size,), "uint8", UNSEALED_DIGEST)
        return Chunk.unsealed(key, header, BytesBufferMemoryObj(payload), MEMORY_TIER).sealed()

    async def store() -> int | None:
        begin = next(begins, None)
        if begin is None:
            return None
        some = keys[begin : begin + CHUNKS_IN_A_CALL]
        kept = await backend.batched_put([chunk_of(key) for key in some])
        stored.extend(key for key, is_kept in zip(some, kept, strict=True) if is_kept)
        return sum(kept)

    async def fetch() -> int:
        some = chosen.sample(stored, min(CHUNKS_IN_A_CALL, len(stored)))
        found = [
            one
            for one in await backend.batched_get(
                some, lambda size: BytesBufferMemoryObj(bytearray(size)), CALL_TIMEOUT_S
            )
            if isinstance(one, Chunk)
        ]
        for one in found:
            one.release()
        return len(found)

    backend = create_remote_backend(url, token, CALL_TIMEOUT_S, "load")
    await backend.open()
    try:
        took_s = await phase("store", store, given.concurrency, given.seconds / 2)
        print(f"{len(stored)} of {given.chunks} chunks were kept")
        if stored:
            await phase("fetch", fetch, given.concurrency, given.seconds - took_s)
    finally:
        await backend.batched_remove(keys)
        await backend.close()


async def load_lookup(url: str, token: TokenFile | None, given: argparse.Namespace) -> None:
    """Announce a prefix, look it up, and end the instance that announced it."""
    instance = f"load-{secrets.token_hex(8)}"
    chunk_ids = [secrets.token_bytes(16) for _ in range(given.chunks)]

    async def look_up() -> int:
        return (await client.lookup(chunk_ids)).num_prefix

    client = LookupClient(url, token, CALL_TIMEOUT_S)
    await client.open()
    try:
        await client.renew_instance(instance, incarnation=1, kind="sidecar", ttl_ms=LEASE_MS)
        events = [StoreEvent("store", one, MEMORY_TIER, 1) for one in chunk_ids]
        await client.send_events(instance, incarnation=1, first_sequence=0, events=events)
        async with asyncio.timeout(SEEN_S):
            while await look_up() < len(chunk_ids):
                await asyncio.sleep(0.05)
        await phase("lookup", look_up, given.concurrency, given.seconds)
    finally:
        await client.end_instance(instance)
        await client.close()


def main() -> None:
    """Run the load that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load", description=__doc__)
    parser.add_argument("url", help="lm://host:port of a cache_storage, or http(s):// of a lookup")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--size", type=int, default=4 << 20, help="bytes of a chunk")
    parser.add_argument("--chunks", type=int, default=64, help="stored, or those of the prefix")
    parser.add_argument("--concurrency", type=int, default=4, help="calls at once")
    parser.add_argument("--token-file", type=Path)
    given = parser.parse_args()
    token = None if given.token_file is None else TokenFile(given.token_file, "token-file")
    load = load_lookup if given.url.startswith("http") else load_storage
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(load(given.url, token, given))


if __name__ == "__main__":
    main()
