"""Stores chunks, fetches them again, removes them; measures the first two."""

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
from lmcache_core.security import ClientTls, TokenFile
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend

from lmcache_ctl.bench.chunks import MODEL, BenchChunks
from lmcache_ctl.bench.phases import CALL_TIMEOUT_S, Call, Done, PhaseRun, no_fetch
from lmcache_ctl.bench.report import Load, Report
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.rest import tls_context
from lmcache_ctl.settings import CtlSettings

STORE_SHARE: Final = 0.5
"""Of the time, at most, for storing."""
CLEAN_TIMEOUT_S: Final = 30.0
REMOVED_AT_ONCE: Final = 128


async def run_load(settings: CtlSettings, load: Load) -> Report:
    """Store, fetch, remove.

    Raises:
        CtlError: The target cannot be reached.
        UsageError: Its URL, token or TLS files are wrong.
    """
    async with _opened(settings, load) as backend:
        chunks = BenchChunks(load.chunk_bytes)
        stored: list[int] = []
        try:
            store = await PhaseRun("store", load, load.seconds * STORE_SHARE).run(_storing(backend, chunks, stored, load))
            left_s = max(load.seconds - store.seconds, load.seconds * STORE_SHARE)
            fetching = PhaseRun("fetch", load, left_s).run
            fetch = await fetching(_fetching(backend, chunks, stored, load)) if stored else no_fetch()
        finally:
            num_removed, num_left = await _clean(backend, chunks)
    return Report(load, [store, fetch], num_removed, num_left)


@asynccontextmanager
async def _opened(settings: CtlSettings, load: Load) -> AsyncIterator[StorageBackend]:
    try:
        token = None if settings.token_file is None else TokenFile(settings.token_file, "token-file")
        is_encrypted = load.url.startswith(("https://", "lm+tls://"))
        tls = ClientTls(tls_context(settings.tls), settings.tls_name) if is_encrypted else None
        backend = create_remote_backend(load.url, token, CALL_TIMEOUT_S, MODEL, tls=tls)
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await backend.open()
            await backend.batched_contains([BenchChunks(load.chunk_bytes).key(0)])
    except (LMCacheError, TimeoutError) as exc:
        await backend.close()
        raise CtlError(
            f"{load.url} cannot be used: {exc or 'no answer in time'}; is that a cache_storage, and --token-file one of its tokens?"
        ) from exc
    try:
        yield backend
    finally:
        await backend.close()


def _storing(backend: StorageBackend, chunks: BenchChunks, stored: list[int], load: Load) -> Call:
    batches = iter([range(at, min(at + load.batch, load.num_chunks)) for at in range(0, load.num_chunks, load.batch)])

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


def _fetching(backend: StorageBackend, chunks: BenchChunks, stored: Sequence[int], load: Load) -> Call:
    chosen = random.Random(0)  # noqa: S311 (not for secrets: the same order each time)

    async def call() -> Done | None:
        keys = [chunks.key(number) for number in chosen.sample(stored, min(load.batch, len(stored)))]
        done, started = Done(), time.perf_counter()
        results = await backend.batched_get(keys, lambda num_bytes: BytesBufferMemoryObj(bytearray(num_bytes)), CALL_TIMEOUT_S)
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
