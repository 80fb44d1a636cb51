"""Stores chunks at a cache_storage, fetches them again, removes them; measures the first two."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import Miss
from lmcache_core.security import ClientTls
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.base import RemoteOptions
from lmcache_core.storage.remote.http import MAX_CONNECTIONS, HttpBackend

from lmcache_ctl.bench.chunks import MODEL, BenchChunks
from lmcache_ctl.bench.phases import CALL_TIMEOUT_S, Call, Done, PhaseRun, Tell, no_fetch
from lmcache_ctl.bench.report import Load, Phase, Report
from lmcache_ctl.bench.ways import MAX_PROBES, asking_for_nothing, way_phases, way_to
from lmcache_ctl.cluster.asking import given_token
from lmcache_ctl.cluster.services import HOW_TO_AUTHENTICATE, Service
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.rest import tls_context
from lmcache_ctl.settings import CtlSettings

STORE_SHARE: Final = 0.5
"""Of the time, at most, for storing."""
CLEAN_TIMEOUT_S: Final = 30.0
REMOVED_AT_ONCE: Final = 128


async def run_storage_load(
    settings: CtlSettings, service: Service, load: Load, tell: Tell
) -> Report:
    """Learn what the way takes; store, fetch, remove.

    Raises:
        CtlError: The target cannot be reached.
        UsageError: Its URL, token or TLS files are wrong.
    """
    async with _opened(settings, service) as backend:
        chunks = BenchChunks(load.chunk_bytes)
        way = await _of_the_way(settings, service, backend, load, tell)
        stored: list[int] = []
        try:
            storing = PhaseRun("store", load.concurrency, load.seconds * STORE_SHARE, tell)
            store = await storing.run(_storing(backend, chunks, stored, load))
            left_s = max(load.seconds - store.seconds, load.seconds * STORE_SHARE)
            fetching = PhaseRun("fetch", load.concurrency, left_s, tell)
            fetch = (
                await fetching.run(_fetching(backend, chunks, stored, load))
                if stored
                else no_fetch()
            )
        finally:
            num_removed, num_left = await _clean(backend, chunks)
    return Report(load, [*way, store, fetch], num_removed, num_left)


@asynccontextmanager
async def _opened(settings: CtlSettings, service: Service) -> AsyncIterator[StorageBackend]:
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
            f"A token of its own is given by {HOW_TO_AUTHENTICATE}"
        ) from exc
    try:
        yield backend
    finally:
        await backend.close()


def _backend(settings: CtlSettings, service: Service) -> StorageBackend:
    token = given_token(settings) or service.token
    if service.url.startswith("http"):
        way = way_to(service, settings, MAX_CONNECTIONS)
        if way is not None:
            return HttpBackend(service.url, RemoteOptions(token, CALL_TIMEOUT_S, MODEL), way)
    is_encrypted = service.url.startswith(("https://", "lm+tls://"))
    tls = ClientTls(tls_context(settings.tls), service.tls_name) if is_encrypted else None
    return create_remote_backend(service.url, token, CALL_TIMEOUT_S, MODEL, tls=tls)


async def _of_the_way(
    settings: CtlSettings, service: Service, backend: StorageBackend, load: Load, tell: Tell
) -> list[Phase]:
    if service.url.startswith("http"):
        async with asking_for_nothing(service, settings) as call:
            return await way_phases(service, call, load, tell)
    return await way_phases(service, _asking_for_one(backend), load, tell)


def _asking_for_one(backend: StorageBackend) -> Call:
    """Whether one chunk is there that is not: the smallest frames of lm://."""
    rest, key = iter(range(MAX_PROBES)), BenchChunks(1).key(0)

    async def call() -> Done | None:
        if next(rest, None) is None:
            return None
        done, started = Done(), time.perf_counter()
        await backend.batched_contains([key])
        done.seconds = time.perf_counter() - started
        return done

    return call


def _storing(backend: StorageBackend, chunks: BenchChunks, stored: list[int], load: Load) -> Call:
    batches = iter(
        [
            range(at, min(at + load.batch, load.num_chunks))
            for at in range(0, load.num_chunks, load.batch)
        ]
    )

    async def call() -> Done | None:
        numbers = next(batches, None)
        if numbers is None:
            return None
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
    backend: StorageBackend, chunks: BenchChunks, stored: Sequence[int], load: Load
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
    """Remove whatever may have been stored; how many were there, and how many still are."""
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
