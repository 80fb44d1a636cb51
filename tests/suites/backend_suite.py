"""What every tier must do. A test module subclasses `BackendSuite` and gives it a `backend`
fixture.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.hot import LocalCPUBackend

from tests.fixtures.waiting import until
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload

ARENA_BYTES = 1 << 20
LARGE_PAYLOAD_BYTES = 300_001


class BackendUnderTest(ABC):
    """A tier and the way around it. The raw access must not go through the tier's own code.

    Attributes:
        backend: The tier, not opened yet.
    """

    backend: StorageBackend

    @abstractmethod
    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        """Put a record where the tier finds it: before it is opened, or in the place of one that
        it has put there.
        """

    @abstractmethod
    def raw_get(self, key: ChunkKey) -> bytes | None:
        """The record that the tier has kept, None when there is none."""


class Arena:
    """Memory that knows how much of it is still out.

    Attributes:
        refuses: Set, to have no more room.
    """

    def __init__(self) -> None:
        self.allocator = ArenaAllocator.anonymous(ARENA_BYTES)
        self.refuses = False

    def __call__(self, num_bytes: int) -> MemoryObj | None:
        """See `Allocate`."""
        return None if self.refuses else self.allocator.allocate((num_bytes,), None)


def payload_of(result: Result) -> bytes | MissReason:
    """The payload of a result (which is released), or why there is none."""
    if isinstance(result, Miss):
        return result.reason
    data = bytes(result.memory.byte_array)
    result.release()
    return data


class BackendSuite:
    """The contract of `StorageBackend`; `under_test` is the fixture to provide."""

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for what is read; every reference must have come back at the end."""
        arena = Arena()
        yield arena
        arena.allocator.check_integrity()
        assert arena.allocator.used_bytes == 0, "a reference was not given back"

    @pytest_asyncio.fixture
    async def backend(self, under_test: BackendUnderTest) -> AsyncIterator[StorageBackend]:
        """The tier, opened, and closed twice at the end."""
        await under_test.backend.open()
        yield under_test.backend
        await under_test.backend.close()
        await under_test.backend.close()

    async def test_what_is_put_lies_there_as_one_record(
        self, backend: StorageBackend, under_test: BackendUnderTest
    ) -> None:
        chunk = make_chunk("a")
        assert await backend.batched_put([chunk]) == [True]
        assert under_test.raw_get(chunk.key) == chunk.head + make_payload("a")

    async def test_results_stand_in_the_order_of_the_keys(
        self, backend: StorageBackend, arena: Arena
    ) -> None:
        await backend.batched_put([make_chunk(i) for i in (1, 3)])
        keys = [make_key(i) for i in (3, 2, 1, 3)]
        assert await backend.batched_contains(keys) == [True, False, True, True]
        got = [payload_of(result) for result in await backend.batched_get(keys, arena)]
        assert got == [make_payload(3), MissReason.NEVER_STORED, make_payload(1), make_payload(3)]

    async def test_nothing_is_asked_and_nothing_is_answered(
        self, backend: StorageBackend, arena: Arena
    ) -> None:
        assert await backend.batched_contains([]) == []
        assert await backend.batched_get([], arena) == []
        assert await backend.batched_put([]) == []
        assert await backend.batched_remove([]) == 0

    @pytest.mark.parametrize("num_bytes", [0, 1, 511, 512, 4096, LARGE_PAYLOAD_BYTES])
    async def test_any_size_comes_back_whole(
        self, backend: StorageBackend, arena: Arena, num_bytes: int
    ) -> None:
        data = make_payload("sized", num_bytes)
        assert await backend.batched_put([make_chunk("sized", payload=data)]) == [True]
        assert [
            payload_of(result) for result in await backend.batched_get([make_key("sized")], arena)
        ] == [data]

    async def test_chunks_are_borrowed(self, backend: StorageBackend, arena: Arena) -> None:
        chunk = make_chunk("a", allocate=arena)
        await backend.batched_put([chunk])
        held = chunk.memory.get_ref_count()
        assert held >= 1
        chunk.release()
        await backend.batched_remove([chunk.key])
        assert arena.allocator.used_bytes == 0

    async def test_a_second_put_changes_nothing(
        self, backend: StorageBackend, arena: Arena
    ) -> None:
        await backend.batched_put([make_chunk("a")])
        assert await backend.batched_put([make_chunk("a"), make_chunk("a")]) == [True, True]
        assert [
            payload_of(result) for result in await backend.batched_get([make_key("a")], arena)
        ] == [make_payload("a")]

    async def test_tenants_are_kept_apart(self, backend: StorageBackend, arena: Arena) -> None:
        mine, yours = (
            make_chunk("a", tenant="mine"),
            make_chunk("a", tenant="yours", payload=b"other bytes"),
        )
        await backend.batched_put([mine])
        assert await backend.batched_contains([yours.key]) == [False]
        await backend.batched_put([yours])
        got = [
            payload_of(result) for result in await backend.batched_get([mine.key, yours.key], arena)
        ]
        assert got == [make_payload("a"), b"other bytes"]
        assert await backend.clear("mine") == 1
        assert await backend.batched_contains([mine.key, yours.key]) == [False, True]

    async def test_what_is_removed_is_gone(
        self, backend: StorageBackend, under_test: BackendUnderTest, arena: Arena
    ) -> None:
        await backend.batched_put([make_chunk(i) for i in range(3)])
        keys = [make_key(i) for i in range(3)]
        assert await backend.batched_remove([keys[0], make_key("never"), keys[2]]) == 2
        assert await backend.batched_contains(keys) == [False, True, False]
        assert under_test.raw_get(keys[0]) is None
        assert [payload_of(result) for result in await backend.batched_get(keys[:1], arena)] == [
            MissReason.NEVER_STORED
        ]
        assert await backend.clear() == 1
        assert await backend.batched_contains(keys) == [False] * 3

    async def test_many_at_once(self, backend: StorageBackend, arena: Arena) -> None:
        names = range(40)
        puts = await asyncio.gather(
            *(backend.batched_put([make_chunk(i), make_chunk(i + 1)]) for i in names)
        )
        assert all(kept for answer in puts for kept in answer)
        gets = await asyncio.gather(*(backend.batched_get([make_key(i)], arena) for i in names))
        assert [payload_of(got) for [got] in gets] == [make_payload(i) for i in names]

    async def test_a_cancelled_get_gives_its_memory_back(
        self, backend: StorageBackend, arena: Arena
    ) -> None:
        await backend.batched_put([make_chunk(i) for i in range(8)])
        for num_steps in range(6):
            task = asyncio.ensure_future(
                backend.batched_get([make_key(i) for i in range(8)], arena)
            )
            for _ in range(num_steps):
                await asyncio.sleep(0)
            if not task.cancel():
                for result in task.result():
                    payload_of(result)
            else:
                with pytest.raises(asyncio.CancelledError):
                    await task
        await until(lambda: not arena.allocator.used_bytes)

    async def test_a_cancelled_put_lets_go_of_its_chunks(
        self, backend: StorageBackend, arena: Arena
    ) -> None:
        chunks = [make_chunk(i, allocate=arena) for i in range(4)]
        task = asyncio.ensure_future(backend.batched_put(chunks))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        for chunk in chunks:
            chunk.release()

        async def is_gone() -> bool:
            num_removed = await backend.batched_remove([chunk.key for chunk in chunks])
            return not (num_removed or arena.allocator.used_bytes)

        await until(is_gone)

    async def test_a_tier_that_lists_its_chunks_lists_them_all(
        self, backend: StorageBackend
    ) -> None:
        chunks = [make_chunk(i, payload=make_payload(i, 100 * i)) for i in range(3)]
        await backend.batched_put(chunks)
        if isinstance(backend, LocalCPUBackend | DiskBackend):
            assert set(held_keys(backend)) == {chunk.key for chunk in chunks}
            assert dict(backend.held()) == {chunk.key: chunk.num_bytes for chunk in chunks}

    async def test_stats_have_their_figures(self, backend: StorageBackend) -> None:
        await backend.batched_put([make_chunk("a")])
        figures = backend.stats()
        assert figures["num_chunks"] == 1
        assert 0 < figures["used_bytes"] <= figures["capacity_bytes"]


class ReadingBackendSuite(BackendSuite):
    """Besides, for tiers that read bytes from outside the process: nothing damaged and nothing
    foreign is served.
    """

    async def _get_raw(
        self, backend: StorageBackend, under_test: BackendUnderTest, record: bytes, arena: Arena
    ) -> bytes | MissReason:
        await backend.batched_put([make_chunk("a")])
        under_test.raw_set(make_key("a"), record)
        [result] = await backend.batched_get([make_key("a")], arena)
        return payload_of(result)

    async def test_what_lies_there_is_got(self, under_test: BackendUnderTest, arena: Arena) -> None:
        chunk = make_chunk("a")
        under_test.raw_set(chunk.key, chunk.head + make_payload("a"))
        backend = under_test.backend
        await backend.open()
        try:
            [got] = await backend.batched_get([chunk.key], arena)
        finally:
            await backend.close()
        assert isinstance(got, Chunk)
        assert (got.key, got.header, got.head, got.tier) == (
            chunk.key,
            chunk.header,
            chunk.head,
            backend.name,
        )
        assert payload_of(got) == make_payload("a")

    @pytest.mark.parametrize("at", [0, 5, 30, 500, 511, 512, 700, -1])
    async def test_a_flipped_byte_is_a_miss(
        self, backend: StorageBackend, under_test: BackendUnderTest, arena: Arena, at: int
    ) -> None:
        chunk = make_chunk("a")
        record = bytearray(chunk.head + make_payload("a"))
        record[at] ^= 0x40
        assert await self._get_raw(backend, under_test, bytes(record), arena) is MissReason.CORRUPT

    @pytest.mark.parametrize("keep", [0, 10, 512, -1])
    async def test_a_short_record_is_a_miss(
        self, backend: StorageBackend, under_test: BackendUnderTest, arena: Arena, keep: int
    ) -> None:
        chunk = make_chunk("a")
        record = (chunk.head + make_payload("a"))[:keep]
        assert isinstance(await self._get_raw(backend, under_test, record, arena), MissReason)

    async def test_the_record_of_another_key_is_a_miss(
        self, backend: StorageBackend, under_test: BackendUnderTest, arena: Arena
    ) -> None:
        other = make_chunk("b")
        record = other.head + make_payload("b")
        assert isinstance(await self._get_raw(backend, under_test, record, arena), MissReason)

    async def test_no_memory_is_a_miss(self, backend: StorageBackend, arena: Arena) -> None:
        await backend.batched_put([make_chunk("a")])
        arena.refuses = True
        assert [
            payload_of(result) for result in await backend.batched_get([make_key("a")], arena)
        ] == [MissReason.NO_MEMORY]
        assert await backend.batched_contains([make_key("a")]) == [True]
