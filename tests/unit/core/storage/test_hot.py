from __future__ import annotations

import asyncio
import random
import threading

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryAllocatorInterface, MemoryFormat
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage import hot as hot_module
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend

from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload

SLOT_BYTES = 1024
NUM_SLOTS = 8


@pytest.fixture
def removed():
    return []


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


def test_a_chunk_comes_back_with_a_reference_of_its_own(hot):
    key = put(hot, "a")
    [first], [second] = hot.get_many([key]), hot.get_many([key])
    assert bytes(first.memory.byte_array) == make_payload("a")
    assert first.tier == "memory"
    assert first.memory.get_ref_count() == 3
    first.release()
    second.release()
    assert first.memory.get_ref_count() == 1


def test_the_least_recently_used_chunk_goes_first(hot, removed):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    assert get(hot, keys[0]) == make_payload(0)
    put(hot, "one more")
    assert removed == [keys[1]]
    assert hot.contains_many(keys[:2]) == [True, False]


def test_contains_is_no_access(hot, removed):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    hot.contains_many([keys[0]])
    put(hot, "one more")
    assert removed == [keys[0]]


def test_a_referenced_chunk_is_never_evicted(hot, removed):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    [held] = hot.get_many([keys[0]])
    for i in range(3 * NUM_SLOTS):
        put(hot, f"other {i}")
        assert bytes(held.memory.byte_array) == make_payload(0)
    assert keys[0] not in removed
    held.release()


def test_no_room_while_everything_is_referenced(hot, removed):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    held = hot.get_many(keys)
    assert hot.allocate(1) is None
    assert removed == []
    assert hot.stats()["failed_allocations"] == 1
    held[3].release()
    memory = hot.allocate(1)
    assert memory is not None
    assert removed == [keys[3]]
    for chunk in (*held[:3], *held[4:]):
        chunk.release()
    memory.ref_count_down()


def test_an_allocation_above_the_capacity_evicts_nothing(hot, removed):
    put(hot, "a")
    assert hot.allocate(SLOT_BYTES * NUM_SLOTS + 1) is None
    assert removed == []


def test_a_large_allocation_evicts_until_it_fits(hot, removed):
    for i in range(NUM_SLOTS):
        put(hot, i)
    memory = hot.allocate(3 * SLOT_BYTES)
    assert memory is not None
    assert memory.get_size() == 3 * SLOT_BYTES
    assert len(removed) == 3
    memory.ref_count_down()


def test_a_tensor_allocation_has_its_shape_and_evicts_too(hot, removed):
    for i in range(NUM_SLOTS):
        put(hot, i)
    memory = hot.allocate_tensor((2, 4, 16), "bfloat16", MemoryFormat.KV_BLOB)
    assert memory.metadata.shape == (2, 4, 16)
    assert memory.get_size() == 256
    assert len(removed) == 1
    memory.ref_count_down()


def test_a_miss_says_whether_the_chunk_was_evicted(hot):
    keys = [put(hot, i) for i in range(NUM_SLOTS + 1)]
    assert hot.miss(keys[0]).reason is MissReason.EVICTED
    assert hot.miss(make_key("never")).reason is MissReason.NEVER_STORED
    put(hot, 0)
    hot.remove_many([keys[0]])
    assert hot.miss(keys[0]).reason is MissReason.NEVER_STORED


def test_memory_outside_the_arena_is_copied_into_it(hot):
    chunk = make_chunk("foreign")
    assert hot.put_many([chunk]) == [True]
    assert hot.stats()["used_bytes"] == SLOT_BYTES
    assert get(hot, chunk.key) == make_payload("foreign")


def test_memory_outside_the_arena_is_refused_when_there_is_no_room(hot):
    held = hot.allocate(SLOT_BYTES * NUM_SLOTS)
    assert hot.put_many([make_chunk("foreign")]) == [False]
    held.ref_count_down()


def test_what_is_held_stays_unless_it_is_lossy(hot):
    lossless, lossy = make_payload("lossless"), make_payload("lossy")
    key = put(hot, "a", payload=lossy, lossy=True)
    put(hot, "a", payload=make_payload("lossy again"), lossy=True)
    assert get(hot, key) == lossy
    put(hot, "a", payload=lossless)
    assert get(hot, key) == lossless
    put(hot, "a", payload=lossy, lossy=True)
    assert get(hot, key) == lossless
    assert hot.stats()["used_bytes"] == SLOT_BYTES


def test_removal_waits_for_readers_to_let_go_of_the_memory(hot, removed):
    key = put(hot, "a")
    [chunk] = hot.get_many([key])
    assert hot.remove_many([key, key, make_key("other")]) == 1
    assert removed == [key]
    assert hot.contains_many([key]) == [False]
    assert bytes(chunk.memory.byte_array) == make_payload("a")
    assert hot.stats()["arena_used_bytes"] == SLOT_BYTES
    chunk.release()
    assert hot.stats()["arena_used_bytes"] == 0


def test_clear_forgets_one_tenant_or_all(hot):
    mine, yours = put(hot, "a", tenant="mine"), put(hot, "a", tenant="yours")
    assert get(hot, mine) == get(hot, yours)
    assert hot.clear_now("mine") == 1
    assert held_keys(hot) == [yours]
    assert hot.clear_now() == 1


@pytest.mark.parametrize("call", ["clear", "evict"])
async def test_removing_very_many_lets_others_have_their_turn(
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


def test_evict_bytes_frees_what_was_asked_and_spares_the_referenced(hot, removed):
    keys = [put(hot, i) for i in range(NUM_SLOTS)]
    [held] = hot.get_many([keys[0]])
    assert hot.evict_bytes(2 * SLOT_BYTES - 1) == 2 * SLOT_BYTES
    assert removed == keys[1:3]
    assert hot.evict_bytes(SLOT_BYTES * NUM_SLOTS) == (NUM_SLOTS - 3) * SLOT_BYTES
    assert held_keys(hot) == [keys[0]]
    held.release()


class WithoutBounds(MemoryAllocatorInterface):
    """All that the interface asks for, which is no word on capacity."""

    def allocate(self, shape, dtype, fmt=MemoryFormat.UNDEFINED):
        return None

    def free(self, memory_obj):
        raise AssertionError("nothing is handed out")

    def get_ref_count(self, memory_obj):
        return memory_obj.get_ref_count()

    def check_integrity(self):
        pass


def test_an_unbounded_allocator_is_refused():
    with pytest.raises(TypeError, match="bounded"):
        LocalCPUBackend(WithoutBounds(), create_policy())


async def test_close_empties_the_arena_without_reporting(hot, removed):
    put(hot, "a")
    await hot.close()
    await hot.close()
    assert hot.stats()["arena_used_bytes"] == 0
    assert removed == []


def test_threads_that_store_and_read_never_see_a_wrong_byte():
    hot = LocalCPUBackend(ArenaAllocator.anonymous(SLOT_BYTES * NUM_SLOTS), create_policy())
    names = range(3 * NUM_SLOTS)
    keys, payloads = [make_key(i) for i in names], [make_payload(i) for i in names]
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            i = rng.randrange(len(names))
            found = hot.get_many([keys[i], keys[i - 1]])
            if found[0] is None:
                memory = hot.allocate(len(payloads[i]))
                if memory is not None:
                    memory.byte_array[:] = payloads[i]
                    made = make_chunk(i)
                    hot.put_many([Chunk(made.key, made.header, made.head, memory, "test")])
                    memory.ref_count_down()
            for at, chunk in ((i, found[0]), (i - 1, found[1])):
                if chunk is not None:
                    if bytes(chunk.memory.byte_array) != payloads[at]:
                        wrong.append(at)
                    chunk.release()
            if rng.random() < 0.05:
                hot.remove_many([keys[i]])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    hot.check_integrity()
    assert hot.stats()["used_bytes"] == hot.stats()["arena_used_bytes"]
    assert hot.stats()["evicted_chunks"] > 0
