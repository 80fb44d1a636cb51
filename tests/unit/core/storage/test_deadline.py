"""The deadline of every call of a tier: what is late is a miss, and its memory comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage import guard as module
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.guard import Guard, GuardOptions
from lmcache_core.testing.chunks import make_chunk, make_key

from tests.fixtures.wire import Arena

KEYS = [make_key(1), make_key(2)]


class Slow(StorageBackend):
    """Takes memory, then waits."""

    name = "Slow"

    def __init__(self) -> None:
        self.wait_s = 10.0
        self.is_away = False

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._wait()
        return [True] * len(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
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
        await self._wait()
        return 3

    def stats(self) -> dict[str, int]:
        return {"num_chunks": 5}

    async def _wait(self) -> None:
        await asyncio.sleep(self.wait_s)
        if self.is_away:
            raise UnavailableError("away")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class HangingFiles(DiskFiles):
    """Reads wait until they are let go."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, fd: int, buffer: bytearray | memoryview, at: int) -> int:
        self.may_read.wait(30)
        return super().read(fd, buffer, at)


@pytest.fixture
def inner() -> Slow:
    return Slow()


@pytest.fixture
def backend(inner: Slow, monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setattr(module, "CLEAR_TIMEOUT_S", 0.02)
    monkeypatch.setattr(module, "READ_GRACE_S", 0.0)
    return Guard(inner, options=GuardOptions(num_failures=5, timeout_s=0.02))


async def test_late_calls_are_misses_and_give_their_memory_back(backend: Guard) -> None:
    arena = Arena()
    assert await backend.batched_get(KEYS, arena) == [Miss(MissReason.UNAVAILABLE)] * 2
    assert (
        await backend.batched_get(KEYS, arena, timeout_s=0.01) == [Miss(MissReason.UNAVAILABLE)] * 2
    )
    arena.check_empty()
    assert await backend.batched_contains(KEYS) == [False, False]
    assert await backend.batched_remove(KEYS) == 0
    assert backend.stats()["breaker_open"] == 0
    assert await backend.clear() == 0
    assert backend.stats()["breaker_open"] == 1


async def test_calls_in_time_pass(backend: Guard, inner: Slow) -> None:
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


async def test_a_cancelled_call_is_cancelled(backend: Guard) -> None:
    task = asyncio.create_task(backend.batched_contains(KEYS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_put_and_removed_adds_to_the_time_by_its_size(
    inner: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk(1)
    inner.wait_s = 0.2
    backend = Guard(inner, options=GuardOptions(timeout_s=0.01))
    monkeypatch.setattr(module, "MIN_BYTES_PER_S", chunk.num_bytes / 10)
    assert await backend.batched_put([chunk]) == [True]
    monkeypatch.setattr(module, "REMOVAL_S", 10)
    assert await backend.batched_remove(KEYS) == 2


async def test_one_put_that_does_not_end_is_enough_and_only_a_put_ends_it(inner: Slow) -> None:
    clock = Clock()
    backend = Guard(inner, GuardOptions(timeout_s=0.02, cool_down_s=1.0), clock=clock)
    assert await backend.batched_put([make_chunk(1)]) == [False]
    assert backend.stats().items() >= {"breaker_open": 1, "breaker_openings": 1}.items()
    inner.wait_s = 0
    assert await backend.batched_put([make_chunk(1)]) == [False], "not asked"
    clock.now = 1.1
    assert await backend.batched_contains(KEYS) == [
        True,
        True,
    ], "reads go on, and prove nothing for writes"
    assert backend.is_bypassed
    inner.wait_s = 10.0
    assert await backend.batched_put([make_chunk(1)]) == [False], "a probe that hangs again"
    inner.wait_s = 0
    clock.now = 2.2
    assert await backend.batched_put([make_chunk(1)]) == [False], "after twice the time"
    clock.now = 3.3
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert not backend.is_bypassed


@pytest.mark.parametrize("how", ["cancelled", "unavailable", "bypassed"])
async def test_a_probe_of_writes_that_tells_nothing_is_followed_by_another(
    inner: Slow, how: str
) -> None:
    """Or writes would be bypassed for good."""
    clock = Clock()
    backend = Guard(
        inner, GuardOptions(num_failures=2, cool_down_s=1.0, timeout_s=0.05), clock=clock
    )
    assert await backend.batched_put([make_chunk(1)]) == [False]
    clock.now = 5.0
    if how == "cancelled":
        probe = asyncio.create_task(backend.batched_put([make_chunk(1)]))
        await asyncio.sleep(0)
        probe.cancel()
        await asyncio.wait([probe])
    else:
        inner.wait_s, inner.is_away = 0, True
        if how == "bypassed":
            await backend.batched_remove(KEYS)  # the second failure in a row: now nothing passes
        assert await backend.batched_put([make_chunk(1)]) == [False]
    inner.wait_s, inner.is_away = 0, False
    clock.now = 10.0
    assert await backend.batched_put([make_chunk(1)]) == [True]
    assert not backend.is_bypassed


async def test_what_a_tier_answers_from_memory_excuses_no_hung_read(tmp_path: Path) -> None:
    """The index of a disk tier says what is there, however long the disk hangs."""
    files = HangingFiles()
    disk = DiskBackend(tmp_path, 1 << 20, files=files)
    backend = Guard(disk, options=GuardOptions(num_failures=3))
    await backend.open()
    await backend.batched_put([make_chunk(1)])
    files.may_read.clear()
    for _ in range(3):
        assert await backend.batched_contains(KEYS) == [True, False]
        assert await backend.batched_get([make_key("never stored")], Arena()) == [
            Miss(MissReason.NEVER_STORED)
        ]
        assert await backend.batched_get(KEYS[:1], Arena(), timeout_s=0.11) == [
            Miss(MissReason.DEADLINE)
        ]
    assert backend.is_bypassed
    files.may_read.set()
    await backend.close()
