"""Store chunks in a cache_storage, fetch them, remove them; measure storing and fetching."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import UNSEALED_DIGEST, Chunk, Miss, raw_header
from lmcache_core.security import ClientTls
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.base import RemoteOptions
from lmcache_core.storage.remote.http import MAX_CONNECTIONS, HttpBackend

from lmcache_ctl.asking import given_token, tls_context
from lmcache_ctl.bench.calls import (
    CALL_TIMEOUT_S,
    Call,
    Done,
    ServiceTransport,
    asking_for_nothing,
    probing,
    run_phase,
    way_phases,
)
from lmcache_ctl.bench.report import BENCH_NAME, TIER, BenchLoad, Phase, Report
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.output import Tell
from lmcache_ctl.services import HOW_TO_AUTHENTICATE, Endpoint
from lmcache_ctl.settings import CtlSettings

NONCE_BYTES: Final = 16
RANDOM_BYTES: Final = 1 << 20
STORE_SHARE: Final = 0.5
"""Of the time, at most, for storing."""
CLEAN_TIMEOUT_S: Final = 30.0
REMOVED_AT_ONCE: Final = 128


class BenchChunks:
    """Chunks by their number, under names of their own; only their first 16 bytes differ.

    Args:
        chunk_bytes: Payload of each.

    Attributes:
        num_begun: One more than the highest number that was made.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._model = f"{BENCH_NAME}/{secrets.token_hex(8)}"
        self._num_bytes = chunk_bytes
        self._bytes = os.urandom(min(chunk_bytes, RANDOM_BYTES)) * (chunk_bytes // RANDOM_BYTES + 1)
        self.num_begun = 0

    def key(self, number: int) -> ChunkKey:
        """Return its name; the tenant is the one that the server knows the token's owner as."""
        chunk_hash = hashlib.sha256(str(number).encode()).hexdigest()
        return ChunkKey("default", CacheEngineKey("bench", self._model, 1, 0, chunk_hash))

    def make(self, number: int) -> Chunk:
        """Return the chunk, with its digest."""
        payload = (number.to_bytes(NONCE_BYTES, "little") + self._bytes)[: self._num_bytes]
        self.num_begun = max(self.num_begun, number + 1)
        key = self.key(number)
        header = raw_header(key.key, (self._num_bytes,), "uint8", UNSEALED_DIGEST)
        return Chunk.unsealed(key, header, BytesBufferMemoryObj(payload), TIER).sealed()


async def run_storage_load(
    settings: CtlSettings, service: Endpoint, load: BenchLoad, tell: Tell
) -> Report:
    """Measure the way there; store, fetch, remove.

    Raises:
        CtlError: The target cannot be reached.
        UsageError: Its URL, token or TLS files are wrong.
    """
    async with _opened(settings, service) as backend:
        chunks = BenchChunks(load.chunk_bytes)
        if service.url.startswith("http"):
            async with asking_for_nothing(service, settings) as call:
                way = await way_phases(service, call, load, tell)
        else:
            way = await way_phases(service, _asking_for_one(service, backend), load, tell)
        stored: list[int] = []
        try:
            half_s = load.seconds * STORE_SHARE
            storing = _storing(backend, chunks, stored, load)
            store = await run_phase("store", storing, load.concurrency, half_s, tell)
            fetch = Phase("fetch", 0, 0, 0, 0.0, 0.0, 0.0, None, {}, {})
            if stored:
                fetching = _fetching(backend, chunks, stored, load)
                left_s = max(load.seconds - store.seconds, half_s)
                fetch = await run_phase("fetch", fetching, load.concurrency, left_s, tell)
        finally:
            num_removed, num_left = await _clean(backend, chunks)
    return Report(load, [*way, store, fetch], num_removed, num_left)


@asynccontextmanager
async def _opened(settings: CtlSettings, service: Endpoint) -> AsyncIterator[StorageBackend]:
    try:
        backend = _backend(settings, service)
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await backend.open()
            await backend.batched_contains([BenchChunks(1).key(0)])
    except (LMCacheError, TimeoutError) as exc:
        await backend.close()
        raise CtlError(
            f"{service.url} cannot be used: {exc or 'no answer in time'}; is that a cache_storage? "
            f"A token of its own is given with {HOW_TO_AUTHENTICATE}"
        ) from exc
    try:
        yield backend
    finally:
        await backend.close()


def _backend(settings: CtlSettings, service: Endpoint) -> StorageBackend:
    token = given_token(settings) or service.token
    leads_elsewhere = (service.socket_path, service.tls_name, service.host) != (None, None, None)
    if service.url.startswith("http") and leads_elsewhere:  # its URL alone does not lead there
        way = ServiceTransport(service, settings, MAX_CONNECTIONS)
        return HttpBackend(service.url, RemoteOptions(token, CALL_TIMEOUT_S, BENCH_NAME), way)
    is_encrypted = service.url.startswith(("https://", "lm+tls://"))
    tls = ClientTls(tls_context(settings.tls), service.tls_name) if is_encrypted else None
    return create_remote_backend(service.url, token, CALL_TIMEOUT_S, BENCH_NAME, tls=tls)


def _asking_for_one(service: Endpoint, backend: StorageBackend) -> Call:
    """Return a call that asks for one missing chunk: the smallest frames of lm://."""
    key = BenchChunks(1).key(0)

    async def ask() -> float:
        started = time.perf_counter()
        await backend.batched_contains([key])
        return time.perf_counter() - started

    return probing(service, ask)


def _storing(
    backend: StorageBackend, chunks: BenchChunks, stored: list[int], load: BenchLoad
) -> Call:
    begins = iter(range(0, load.num_chunks, load.batch))

    async def call() -> Done | None:
        begin = next(begins, None)
        if begin is None:
            return None
        numbers = range(begin, min(begin + load.batch, load.num_chunks))
        made = [chunks.make(number) for number in numbers]
        done, started = Done(), time.perf_counter()
        kept = await backend.batched_put(made)
        done.seconds = time.perf_counter() - started
        stored.extend(number for number, is_kept in zip(numbers, kept, strict=True) if is_kept)
        done.num_chunks = sum(kept)
        done.num_bytes = done.num_chunks * load.chunk_bytes
        if not all(kept):
            done.not_done["not kept"] += len(kept) - done.num_chunks
        return done

    return call


def _fetching(
    backend: StorageBackend, chunks: BenchChunks, stored: Sequence[int], load: BenchLoad
) -> Call:
    chosen = random.Random(0)  # noqa: S311 (not for secrets: the same order each time)

    async def call() -> Done | None:
        keys = [
            chunks.key(number) for number in chosen.sample(stored, min(load.batch, len(stored)))
        ]
        done, started = Done(), time.perf_counter()
        results = await backend.batched_get(
            keys, lambda num_bytes: BytesBufferMemoryObj(bytearray(num_bytes)), CALL_TIMEOUT_S
        )
        done.seconds = time.perf_counter() - started
        for result in results:
            if isinstance(result, Miss):
                done.not_done[result.reason] += 1
            else:
                done.num_chunks += 1
                done.num_bytes += result.memory.get_size()
                result.release()
        return done

    return call


async def _clean(backend: StorageBackend, chunks: BenchChunks) -> tuple[int, int]:
    """Remove every chunk that may be stored; return how many there were, and how many are left."""
    keys = [chunks.key(number) for number in range(chunks.num_begun)]
    num_removed = num_left = 0
    try:
        async with asyncio.timeout(CLEAN_TIMEOUT_S):
            for at in range(0, len(keys), REMOVED_AT_ONCE):
                some = keys[at : at + REMOVED_AT_ONCE]
                num_removed += await backend.batched_remove(some)
                num_left += sum(await backend.batched_contains(some))
    except (LMCacheError, TimeoutError):
        return num_removed, max(len(keys) - num_removed, num_left)
    return num_removed, num_left
