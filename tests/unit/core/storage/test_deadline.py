"""The deadline: what is late is a miss, and its memory comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers import BreakerBackend, BreakerOptions, DeadlineBackend
from lmcache_core.testing.chunks import make_chunk, make_key

from tests.fixtures.wire import Arena

KEYS = [make_key(1), make_key(2)]


class Slow(StorageBackend):
    """Takes memory, then waits."""

    name = "Slow"

    def __init__(self) -> None:
        self.wait_s = 10.0
        self.error: Exception | None = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._wait()
        return [True] * len(keys)

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        chunks = [make_chunk(key, allocate=allocate) for key in keys]
        try:
            await self._wait()
        except BaseException:
            for chunk in chunks:
                chunk.release()
            raise
        return list(chunks)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self._wait()
        return [True] * len(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        await self._wait()
        return len(keys)

    async def clear(self, tenant: str | None = None) -> int:
        return 3

    def stats(self) -> dict[str, int]:
        return {"num_chunks": 5}

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(self.wait_s)


@pytest.fixture
def inner() -> Slow:
    return Slow()


@pytest.fixture
def backend(inner: Slow) -> DeadlineBackend:
    return DeadlineBackend(inner, 0.02)


async def test_late_calls_are_misses_and_give_their_memory_back(backend: DeadlineBackend) -> None:
    arena = Arena()
    assert await backend.batched_get(KEYS, arena) == [Miss(MissReason.DEADLINE)] * 2
    arena.check_empty()
    assert await backend.batched_contains(KEYS) == [False, False]
    assert await backend.batched_put([make_chunk(1)]) == [False]
    assert await backend.batched_remove(KEYS) == 0
    assert backend.stats() == {"num_chunks": 5, "late_calls": 4}


async def test_calls_in_time_pass(backend: DeadlineBackend, inner: Slow) -> None:
    inner.wait_s = 0
    await backend.open()
    arena = Arena()
    for result in await backend.batched_get(KEYS, arena):
        assert isinstance(result, Chunk)
        result.release()
    arena.check_empty()
    assert await backend.batched_contains(KEYS) == [True, True]
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert await backend.batched_remove(KEYS) == 2
    assert await backend.clear() == 3
    await backend.close()


@pytest.mark.parametrize("error", [UnavailableError("gone"), TimeoutError("of its own")])
async def test_errors_from_inside_pass(backend: DeadlineBackend, inner: Slow, error: Exception) -> None:
    inner.error = error
    with pytest.raises(type(error)):
        await backend.batched_contains(KEYS)
    assert backend.stats()["late_calls"] == 0


async def test_a_cancelled_call_is_cancelled(backend: DeadlineBackend) -> None:
    task = asyncio.create_task(backend.batched_contains(KEYS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_line_per_change(backend: DeadlineBackend, inner: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for wait_s in (10, 10, 0, 0, 10):
        inner.wait_s = wait_s
        await backend.batched_contains(KEYS)
    assert [record.getMessage() for record in caplog.records] == [
        "tier Slow does not answer within 0.020 s",
        "tier Slow answers in time again; 2 calls were late so far",
        "tier Slow does not answer within 0.020 s",
    ]


async def test_a_breaker_around_it_opens_on_late_gets(backend: DeadlineBackend) -> None:
    breaker = BreakerBackend(backend, options=BreakerOptions(num_failures=2))
    arena = Arena()
    for _ in range(2):
        assert await breaker.batched_get(KEYS, arena) == [Miss(MissReason.DEADLINE)] * 2
    assert await breaker.batched_get(KEYS, arena) == [Miss(MissReason.BREAKER_OPEN)] * 2
    arena.check_empty()
