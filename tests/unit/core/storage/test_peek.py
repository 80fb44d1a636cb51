"""What tiers report about chunks without counting a read, and which chunks are hottest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import HeldChunk, LocalCPUBackend

from tests.fixtures.disk_tier import file_of, get, opened
from tests.suites.chunks import make_chunk, make_key

SLOT_BYTES = 1024
NUM_SLOTS = 8
NOW = 1000.0


@pytest.fixture(params=["adaptive", "s3fifo"])
def make_hot(request: pytest.FixtureRequest) -> Callable[[], LocalCPUBackend]:
    return lambda: LocalCPUBackend(
        ArenaAllocator.anonymous(SLOT_BYTES * NUM_SLOTS),
        create_policy(request.param),
        clock=lambda: NOW,
    )


def put(hot: LocalCPUBackend, name: object) -> ChunkKey:
    chunk = make_chunk(name, allocate=hot.allocate)
    assert hot.put_many([chunk]) == [True]
    chunk.release()
    return chunk.key


def test_peek_reports_size_age_holders_and_loss(make_hot: Callable[[], LocalCPUBackend]) -> None:
    hot = make_hot()
    key = put(hot, "a")
    [chunk] = hot.get_many([key])
    assert isinstance(chunk, Chunk)
    [held, missing] = hot.peek_many([key, make_key("b")])
    assert held == HeldChunk(chunk.num_bytes, NOW, 1, False)
    assert missing == Miss(MissReason.NEVER_STORED)
    chunk.release()
    [held] = hot.peek_many([key])
    assert isinstance(held, HeldChunk)
    assert held.num_holders == 0


def test_peek_is_no_access(make_hot: Callable[[], LocalCPUBackend]) -> None:
    peeked, plain = make_hot(), make_hot()
    for hot in (peeked, plain):
        for name in range(NUM_SLOTS):
            put(hot, name)
    peeked.peek_many([make_key(0)])
    for hot in (peeked, plain):
        put(hot, "one more")
    assert peeked.peek_many([make_key(0)]) == [Miss(MissReason.EVICTED)]
    assert set(held_keys(peeked)) == set(held_keys(plain))


def test_hottest_chunks_come_first(make_hot: Callable[[], LocalCPUBackend]) -> None:
    hot = make_hot()
    for name in range(NUM_SLOTS):
        put(hot, name)
    for name in (1, 5, 1):
        [chunk] = hot.get_many([make_key(name)])
        assert chunk is not None
        chunk.release()
    hottest = hot.hottest()
    assert set(hottest) == set(hot.held())
    assert {key for key, _ in hottest[:2]} == {make_key(1), make_key(5)}, (
        "what was read is hotter than what was not"
    )


async def test_disk_remembers_damaged_chunks(tmp_path: Path) -> None:
    disk = await opened(tmp_path)
    await disk.batched_put([make_chunk("a"), make_chunk("b")])
    keys = [make_key("a"), make_key("b"), make_key("c")]
    file = file_of(tmp_path, "a")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert [isinstance(entry, Miss) for entry in disk.peek_many(keys)] == [False, False, True], (
        "a peek reads no file"
    )
    assert await get(disk, "a") == [MissReason.CORRUPT]
    assert disk.peek_many(keys)[::2] == [Miss(MissReason.CORRUPT), Miss(MissReason.NEVER_STORED)]
    assert await disk.batched_put([make_chunk("a")]) == [True]
    assert not isinstance(disk.peek_many(keys)[0], Miss)
    await disk.close()
    disk.check_integrity()
