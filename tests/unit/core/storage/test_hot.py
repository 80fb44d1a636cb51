"""The host-memory tier: references, room, and threads that use it at the same time."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryAllocatorInterface
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage import hot as hot_module
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import HeldChunk, LocalCPUBackend

from tests.suites.chunks import make_chunk, make_key, make_payload

SLOT_BYTES = 1024
NUM_SLOTS = 8


@pytest.fixture
def hot(removed):
    backend = LocalCPUBackend(
        ArenaAllocator.anonymous(SLOT_BYTES * NUM_SLOTS), create_policy(), removed.append
    )
    yield backend
    backend.check_integrity()


def put(hot: LocalCPUBackend, name: object, **options: object) -> ChunkKey:
    chunk = make_chunk(name, allocate=hot.allocate, **options)
    assert hot.put_many([chunk]) == [True]
    chunk.release()
    return chunk.key


def get(hot: LocalCPUBackend, key: ChunkKey) -> bytes | None:
    [chunk] = hot.get_many([key])
    if chunk is None:
        return None
    data = bytes(chunk.memory.byte_array)
    chunk.release()
    return data


def test_least_recently_used_chunk_is_evicted_and_contains_is_no_use(hot, removed):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    assert get(hot, keys[0]) == make_payload(0)
    assert hot.contains_many([keys[1]]) == [True]
    put(hot, "one more")
    assert removed == [keys[1]]
    assert hot.contains_many(keys[:2]) == [True, False]


def test_removed_chunk_keeps_its_memory_until_readers_release_it(hot, removed):
    key = put(hot, "a")
    [chunk] = hot.get_many([key])
    assert hot.remove_many([key, key, make_key("other")]) == 1
    assert removed == [key]
    assert hot.contains_many([key]) == [False]
    assert bytes(chunk.memory.byte_array) == make_payload("a")
    assert hot.stats()["arena_used_bytes"] == SLOT_BYTES
    chunk.release()
    assert hot.stats()["arena_used_bytes"] == 0


@pytest.mark.parametrize("call", ["clear", "evict"])
async def test_removal_of_many_chunks_lets_other_tasks_run(
    monkeypatch: pytest.MonkeyPatch, hot: LocalCPUBackend, removed: list[ChunkKey], call: str
) -> None:
    monkeypatch.setattr(hot_module, "REMOVED_AT_ONCE", 2)
    monkeypatch.setattr(hot_module, "EVICTED_AT_ONCE_BYTES", 2 * SLOT_BYTES)
    for i in range(NUM_SLOTS):
        put(hot, i)
    seen = []

    async def look() -> None:
        while len(removed) < NUM_SLOTS:
            seen.append(len(removed))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    if call == "clear":
        assert await hot.clear() == NUM_SLOTS
    else:
        assert await hot.evict(1 << 40) == NUM_SLOTS * SLOT_BYTES
    await looking
    assert {2, 4, 6} <= set(seen)


def test_peek_reports_size_age_holders_and_loss():
    hot = LocalCPUBackend(ArenaAllocator.anonymous(1 << 16), create_policy(), clock=lambda: 1000.0)
    key = put(hot, "a")
    [chunk] = hot.get_many([key])
    assert hot.peek_many([key, make_key("b")]) == [
        HeldChunk(chunk.num_bytes, 1000.0, num_holders=1, lossy=False),
        Miss(MissReason.NEVER_STORED),
    ]
    chunk.release()
    [held] = hot.peek_many([key])
    assert held.num_holders == 0


def test_hottest_chunks_come_first(hot):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    for name in (1, 5, 1):
        get(hot, keys[name])
    hottest = hot.hottest()
    assert set(hottest) == set(hot.held())
    assert {key for key, _ in hottest[:2]} == {keys[1], keys[5]}


def test_allocation_above_the_capacity_evicts_nothing(hot, removed):
    put(hot, "a")
    assert hot.allocate(SLOT_BYTES * NUM_SLOTS + 1) is None
    assert removed == []


def test_unbounded_allocator_is_refused():
    with pytest.raises(TypeError, match="bounded"):
        LocalCPUBackend(mock.Mock(spec=MemoryAllocatorInterface), create_policy())


async def test_close_empties_the_arena_without_reporting(hot, removed):
    put(hot, "a")
    await hot.close()
    await hot.close()
    assert hot.stats()["arena_used_bytes"] == 0
    assert removed == []
