"""The disk tier: room, two writers of one chunk, damage, ownership, the names of tenants; time to
live and quotas, also over a restart.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.layout import BLOCK_BYTES, charged_bytes, tenant_directory, tenant_of
from lmcache_core.storage.eviction import TenantQuotas, TierLimits

from tests.fixtures.disk_tier import PATIENCE_S, TroubledFiles, file_of, get, num_records, put
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


NUM_LIMITED = 16
LIMITED_BYTES = NUM_LIMITED * BLOCK_BYTES
TTL_S = 60.0
QUOTA_SLOTS = 3
QUOTAS = TenantQuotas(QUOTA_SLOTS * BLOCK_BYTES, {"default": LIMITED_BYTES})


@pytest.fixture
def open_disk(opened, tmp_path, clock, removed):
    """Opens the same directory, with the limits above unless told otherwise."""
    limits = TierLimits(TTL_S, QUOTAS)
    return partial(
        opened, tmp_path, LIMITED_BYTES, on_removed=removed.append, limits=limits, clock=clock
    )


@pytest.fixture
async def limited(open_disk):
    return await open_disk()


def num_held(tier: DiskBackend, tenant: str) -> int:
    return sum(key.tenant == tenant for key, _ in tier.held())


async def test_chunk_is_served_for_its_time_then_its_file_goes(limited, clock, removed, tmp_path):
    await put(limited, "a")
    clock.now += TTL_S - 1
    assert await get(limited, "a") == [make_payload("a")]
    clock.now += 1
    assert await limited.batched_contains([make_key("a")]) == [False]
    assert not limited.held()
    assert await get(limited, "a") == [MissReason.EXPIRED]
    await until(lambda: not num_records(tmp_path) and removed == [make_key("a")])
    assert await get(limited, "a", "never") == [MissReason.EXPIRED, MissReason.NEVER_STORED]
    figures = limited.stats()
    assert (figures["expired_chunks"], figures["evicted_chunks"], figures["used_bytes"]) == (
        1,
        0,
        0,
    )


async def test_age_survives_a_restart(limited, open_disk, clock, tmp_path):
    await put(limited, "old", "young")
    os.utime(file_of(tmp_path, "old"), (clock.now - TTL_S + 5,) * 2)
    os.utime(file_of(tmp_path, "young"), (clock.now,) * 2)
    await limited.close()
    again = await open_disk()
    clock.now += 4
    assert await get(again, "old", "young") == [make_payload("old"), make_payload("young")]
    clock.now += 2
    assert await get(again, "old", "young") == [MissReason.EXPIRED, make_payload("young")]
    await until(lambda: num_records(tmp_path) == 1)


async def test_expired_file_that_cannot_be_removed_stays_charged(open_disk, clock, files):
    limited = await open_disk(files=files)
    await put(limited, "a", "b")
    clock.now += TTL_S
    files.failing = {"unlink": errno.EROFS}
    await put(limited, "c")
    reasons = [MissReason.EXPIRED, MissReason.EXPIRED, make_payload("c")]
    assert await get(limited, "a", "b", "c") == reasons
    assert (limited.stats()["used_bytes"], limited.stats()["quarantined_files"]) == (
        3 * BLOCK_BYTES,
        2,
    )


async def test_tenant_over_its_quota_evicts_its_own_chunks(limited, removed, tmp_path):
    await put(limited, *range(5), tenant="default")
    await put(limited, *range(QUOTA_SLOTS), tenant="mine")
    await put(limited, "one more", tenant="mine")
    await until(lambda: removed == [make_key(0, "mine")])
    assert num_held(limited, "mine") == QUOTA_SLOTS
    assert num_records(tmp_path / "mine") == QUOTA_SLOTS
    assert num_records(tmp_path / "default") == 5


@pytest.mark.parametrize(("tenant", "num_slots"), [("default", NUM_LIMITED), ("mine", QUOTA_SLOTS)])
async def test_capacity_and_quota_bound_files_being_written(open_disk, tmp_path, tenant, num_slots):
    class Watched(DiskFiles):
        """Counts the files after each write, while no name changes."""

        peak = 0
        names = threading.Lock()

        def write(self, fd, buffers):
            super().write(fd, buffers)
            with self.names:
                paths = [*tmp_path.rglob("*.kvr"), *tmp_path.rglob("*.tmp")]
                self.peak = max(self.peak, sum(path.is_file() for path in paths))

        def rename(self, source, target):
            with self.names:
                super().rename(source, target)

        def unlink(self, path):
            with self.names:
                super().unlink(path)

    files = Watched()
    limited = await open_disk(files=files)
    await asyncio.gather(*(limited.batched_put([make_chunk(i, tenant=tenant)]) for i in range(40)))
    assert 1 < files.peak <= num_slots
    assert limited.stats()["reserved_bytes"] == 0


async def test_smaller_quota_after_a_restart_holds_at_once(limited, open_disk, tmp_path):
    await put(limited, *range(5), tenant="default")
    await put(limited, *range(QUOTA_SLOTS), tenant="mine")
    await limited.close()
    await open_disk(limits=TierLimits(None, TenantQuotas(None, {"mine": BLOCK_BYTES})))
    assert num_records(tmp_path / "mine") == 1
    assert num_records(tmp_path / "default") == 5


async def test_chunk_above_the_quota_is_refused_and_evicts_nothing(limited, removed):
    await put(limited, 0, tenant="mine")
    large = make_chunk("large", tenant="mine", payload=bytes(QUOTA_SLOTS * BLOCK_BYTES))
    assert await limited.batched_put([large]) == [False]
    assert (limited.stats()["quota_refused_chunks"], removed) == (1, [])


async def test_writes_remove_expired_chunks(limited, clock, tmp_path):
    await put(limited, *range(5))
    clock.now += TTL_S
    await put(limited, "new")
    assert num_records(tmp_path) == 1
    assert limited.stats()["expired_chunks"] == 5
