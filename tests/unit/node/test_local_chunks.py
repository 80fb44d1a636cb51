"""What a drain lists and reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.hot import LocalCPUBackend

from tests.fixtures.local_chunks import hot_with, local_chunks, put
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload


@pytest.fixture
def hot() -> LocalCPUBackend:
    return hot_with(num_bytes=8192)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[DiskBackend]:
    backend = DiskBackend(tmp_path, 1 << 20)
    await backend.open()
    yield backend
    await backend.close()


async def test_memory_comes_before_the_disk_and_no_chunk_twice(
    hot: LocalCPUBackend, disk: DiskBackend
) -> None:
    put(hot, "a", "b")
    put(hot, "elsewhere", tenant="other")
    for chunk in (
        make_chunk("old"),
        make_chunk("new"),
        make_chunk("b"),
        make_chunk("elsewhere", tenant="other"),
    ):
        await disk.batched_put([chunk])
    listed = local_chunks(hot, disk).hottest_first()
    assert [key for key, _ in listed] == [make_key(name) for name in ("b", "a", "new", "old")]
    assert all(num_bytes > 1000 for _, num_bytes in listed)


async def test_reading_the_disk_evicts_nothing_from_memory(disk: DiskBackend) -> None:
    hot = hot_with(0, 1, 2, 3, num_bytes=4096)
    await disk.batched_put([make_chunk(name) for name in ("x", "y")])
    chunks = local_chunks(hot, disk)
    results = await chunks.read([make_key(name) for name in ("x", 1, "y", "nowhere")])
    assert [bytes(chunk.memory.byte_array) for chunk in results if isinstance(chunk, Chunk)] == [
        make_payload(n) for n in ("x", 1, "y")
    ]
    assert results[3] == Miss(MissReason.NEVER_STORED)
    assert set(held_keys(hot)) == {make_key(name) for name in range(4)}
    for chunk in results:
        if isinstance(chunk, Chunk):
            chunk.release()


async def test_chunk_of_an_unavailable_disk_is_a_miss(hot: LocalCPUBackend, tmp_path: Path) -> None:
    closed = DiskBackend(tmp_path, 1 << 20)
    put(hot, "a")
    first, second = await local_chunks(hot, closed).read([make_key("a"), make_key("b")])
    assert isinstance(first, Chunk)
    first.release()
    assert second == Miss(MissReason.UNAVAILABLE)
