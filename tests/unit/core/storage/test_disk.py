"""The disk tier: room, two writers of one chunk, damage, ownership, and the names of tenants."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.layout import charged_bytes, tenant_directory, tenant_of

from tests.fixtures.disk_tier import PATIENCE_S, TroubledFiles, file_of, get, put
from tests.fixtures.waiting import until
from tests.suites.backend_suite import Arena
from tests.suites.chunks import make_chunk, make_key, make_payload

CHARGE = charged_bytes(512 + 1000)
NUM_SLOTS = 4
CAPACITY_BYTES = CHARGE * NUM_SLOTS


def taken_bytes(root: Path) -> int:
    return sum(
        charged_bytes(path.stat().st_size)
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock"
    )


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.fixture
async def disk(opened, tmp_path, removed):
    return await opened(tmp_path, CAPACITY_BYTES, on_removed=removed.append)


async def test_least_recently_used_chunk_makes_room(disk, removed, tmp_path):
    await put(disk, *range(NUM_SLOTS))
    await get(disk, 0)
    await put(disk, "one more")
    await until(lambda: removed == [make_key(1)])
    assert await get(disk, 0, 1, "one more") == [
        make_payload(0),
        MissReason.EVICTED,
        make_payload("one more"),
    ]
    assert disk.stats()["evicted_chunks"] == 1
    assert taken_bytes(tmp_path) == disk.stats()["used_bytes"] == CAPACITY_BYTES


class HeldWrites(DiskFiles):
    """Each write waits for its own event."""

    def __init__(self):
        self.may_write = []

    def write(self, fd, buffers):
        self.may_write.append(may_continue := threading.Event())
        assert may_continue.wait(PATIENCE_S)
        super().write(fd, buffers)


@pytest.mark.parametrize("is_lossy", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_writes_of_a_chunk_the_better_or_the_first_to_end_is_served(
    opened, tmp_path, is_lossy, first
):
    files = HeldWrites()
    disk = await opened(tmp_path, CAPACITY_BYTES, files)
    puts = []
    for i in range(2):
        chunk = make_chunk("a", payload=make_payload(i), lossy=is_lossy[i])
        puts.append(asyncio.create_task(disk.batched_put([chunk])))
        await until(lambda expected=i + 1: len(files.may_write) == expected)
    for i in (first, 1 - first):
        files.may_write[i].set()
        assert await puts[i] == [True]
    is_replaced = is_lossy[first] and not is_lossy[1 - first]
    assert await get(disk, "a") == [make_payload(1 - first if is_replaced else first)]
    assert disk.stats()["used_bytes"] == taken_bytes(tmp_path) == CHARGE


async def test_overtaken_write_does_not_bring_back_a_removed_chunk(opened, tmp_path):
    files = HeldWrites()
    disk = await opened(tmp_path, CAPACITY_BYTES, files)
    puts = [asyncio.create_task(disk.batched_put([make_chunk("a")])) for _ in range(2)]
    await until(lambda: len(files.may_write) == 2)
    files.may_write[0].set()
    await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    assert await disk.batched_remove([make_key("a")]) == 1
    files.may_write[1].set()
    await asyncio.wait(puts)
    assert sorted(kept for put in puts for kept in put.result()) == [False, True]
    assert await get(disk, "a") == [MissReason.NEVER_STORED]
    assert disk.stats()["used_bytes"] == taken_bytes(tmp_path) == 0


async def test_damaged_file_is_set_aside_and_its_space_is_used_when_needed(disk, removed, tmp_path):
    await put(disk, *range(NUM_SLOTS))
    damage(file_of(tmp_path, 2))
    assert await get(disk, 2) == [MissReason.CORRUPT]
    await until(lambda: removed == [make_key(2)])
    figures = disk.stats()
    assert (figures["quarantined_files"], figures["corrupt_chunks"]) == (1, 1)
    assert len(list((tmp_path / ".bad").iterdir())) == 1
    assert figures["used_bytes"] == CAPACITY_BYTES
    await put(disk, 2)
    assert list((tmp_path / ".bad").iterdir()) == []
    assert await get(disk, *range(NUM_SLOTS)) == [make_payload(i) for i in range(NUM_SLOTS)]


async def test_peek_reads_no_file_and_remembers_damaged_chunks(disk, tmp_path):
    await put(disk, "a", "b")
    damage(file_of(tmp_path, "a"))
    keys = [make_key("a"), make_key("b"), make_key("c")]
    assert [isinstance(entry, Miss) for entry in disk.peek_many(keys)] == [False, False, True]
    assert await get(disk, "a") == [MissReason.CORRUPT]
    assert disk.peek_many(keys)[::2] == [Miss(MissReason.CORRUPT), Miss(MissReason.NEVER_STORED)]
    await put(disk, "a")
    assert not isinstance(disk.peek_many(keys)[0], Miss)


async def test_unreadable_root_is_an_unavailable_tier_and_not_left_locked(opened, tmp_path):
    files = TroubledFiles({"list_directory": errno.EACCES})
    with pytest.raises(UnavailableError, match="Permission denied"):
        await opened(tmp_path, files=files)
    await (await opened(tmp_path)).close()


async def test_other_users_have_no_access_to_the_directory(opened, tmp_path):
    disk = await opened(tmp_path / "made")
    await put(disk, "a")
    await disk.close()
    assert (tmp_path / "made").stat().st_mode & 0o007 == 0
    assert all(path.stat().st_mode & 0o007 == 0 for path in tmp_path.rglob("*.kvr"))


async def test_stalled_read_holds_its_memory_alone_and_blocks_no_lookup(opened, tmp_path):
    files, arena = TroubledFiles(), Arena()
    disk = await opened(tmp_path, CAPACITY_BYTES, files, num_threads=2)
    await put(disk, *range(NUM_SLOTS))
    files.may_read.clear()
    before = files.num_reads
    reading = asyncio.create_task(
        disk.batched_get([make_key(name) for name in range(NUM_SLOTS)], arena)
    )
    await until(lambda: files.num_reads == before + 2)
    reading.cancel()
    await asyncio.wait([reading])
    assert await disk.batched_contains([make_key(0)]) == [True]
    assert arena.allocator.used_bytes == 2 * 1024, "reads that wait for a thread have given it back"
    files.may_read.set()
    assert await get(disk, 0) == [make_payload(0)]
    await disk.close()
    assert arena.allocator.used_bytes == 0


@pytest.mark.parametrize("tenant", ["a.b-c_d", "A/../b", "..", "%2E", "ü b", "x" * 255])
def test_tenant_and_directory_name_each_other(tenant):
    name = tenant_directory(tenant)
    assert Path(name).name == name
    assert not name.startswith(".")
    assert tenant_of(name) == tenant


async def test_chunk_of_a_tenant_that_cannot_have_a_directory_is_refused(disk):
    chunks = [make_chunk("a", tenant=tenant) for tenant in ("", "x" * 256)]
    assert await disk.batched_put(chunks) == [False, False]
    assert disk.stats()["rejected_writes"] == 2
    results = await disk.batched_get([chunk.key for chunk in chunks], Arena())
    assert not any(isinstance(result, Chunk) for result in results)


def test_capacity_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="must be positive"):
        DiskBackend(tmp_path, 0)


async def test_chunk_above_the_capacity_is_refused_and_evicts_nothing(disk):
    await put(disk, 0)
    assert await disk.batched_put([make_chunk("large", payload=bytes(CAPACITY_BYTES))]) == [False]
    assert await get(disk, 0) == [make_payload(0)]
