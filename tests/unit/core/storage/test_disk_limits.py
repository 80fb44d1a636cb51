"""The disk tier with a time to live and with quotas, also over a restart."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial

import pytest
from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.layout import BLOCK_BYTES
from lmcache_core.storage.eviction import TenantQuotas, TierLimits

from tests.fixtures.disk_tier import file_of, get, num_records, put
from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk, make_key, make_payload

NUM_SLOTS = 16
CAPACITY_BYTES = NUM_SLOTS * BLOCK_BYTES
TTL_S = 60.0
QUOTA_SLOTS = 3
QUOTAS = TenantQuotas(QUOTA_SLOTS * BLOCK_BYTES, {"default": CAPACITY_BYTES})


@pytest.fixture
def open_disk(opened, tmp_path, clock, removed):
    """Opens the same directory, with the limits above unless told otherwise."""
    limits = TierLimits(TTL_S, QUOTAS)
    return partial(
        opened, tmp_path, CAPACITY_BYTES, on_removed=removed.append, limits=limits, clock=clock
    )


@pytest.fixture
async def disk(open_disk):
    return await open_disk()


def num_held(tier: DiskBackend, tenant: str) -> int:
    return sum(key.tenant == tenant for key, _ in tier.held())


async def test_chunk_is_served_for_its_time_then_its_file_goes(disk, clock, removed, tmp_path):
    await put(disk, "a")
    clock.now += TTL_S - 1
    assert await get(disk, "a") == [make_payload("a")]
    clock.now += 1
    assert await disk.batched_contains([make_key("a")]) == [False]
    assert not disk.held()
    assert await get(disk, "a") == [MissReason.EXPIRED]
    await until(lambda: not num_records(tmp_path) and removed == [make_key("a")])
    assert await get(disk, "a", "never") == [MissReason.EXPIRED, MissReason.NEVER_STORED]
    figures = disk.stats()
    assert (figures["expired_chunks"], figures["evicted_chunks"], figures["used_bytes"]) == (
        1,
        0,
        0,
    )


async def test_age_survives_a_restart(disk, open_disk, clock, tmp_path):
    await put(disk, "old", "young")
    os.utime(file_of(tmp_path, "old"), (clock.now - TTL_S + 5,) * 2)
    os.utime(file_of(tmp_path, "young"), (clock.now,) * 2)
    await disk.close()
    again = await open_disk()
    clock.now += 4
    assert await get(again, "old", "young") == [make_payload("old"), make_payload("young")]
    clock.now += 2
    assert await get(again, "old", "young") == [MissReason.EXPIRED, make_payload("young")]
    await until(lambda: num_records(tmp_path) == 1)


async def test_expired_file_that_cannot_be_removed_stays_charged(open_disk, clock, files):
    disk = await open_disk(files=files)
    await put(disk, "a", "b")
    clock.now += TTL_S
    files.failing = {"unlink": errno.EROFS}
    await put(disk, "c")
    reasons = [MissReason.EXPIRED, MissReason.EXPIRED, make_payload("c")]
    assert await get(disk, "a", "b", "c") == reasons
    assert (disk.stats()["used_bytes"], disk.stats()["quarantined_files"]) == (3 * BLOCK_BYTES, 2)


async def test_tenant_over_its_quota_evicts_its_own_chunks(disk, removed, tmp_path):
    await put(disk, *range(5), tenant="default")
    await put(disk, *range(QUOTA_SLOTS), tenant="mine")
    await put(disk, "one more", tenant="mine")
    await until(lambda: removed == [make_key(0, "mine")])
    assert num_held(disk, "mine") == QUOTA_SLOTS
    assert num_records(tmp_path / "mine") == QUOTA_SLOTS
    assert num_records(tmp_path / "default") == 5


@pytest.mark.parametrize(("tenant", "num_slots"), [("default", NUM_SLOTS), ("mine", QUOTA_SLOTS)])
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
    disk = await open_disk(files=files)
    await asyncio.gather(*(disk.batched_put([make_chunk(i, tenant=tenant)]) for i in range(40)))
    assert 1 < files.peak <= num_slots
    assert disk.stats()["reserved_bytes"] == 0


async def test_smaller_quota_after_a_restart_holds_at_once(disk, open_disk, tmp_path):
    await put(disk, *range(5), tenant="default")
    await put(disk, *range(QUOTA_SLOTS), tenant="mine")
    await disk.close()
    await open_disk(limits=TierLimits(None, TenantQuotas(None, {"mine": BLOCK_BYTES})))
    assert num_records(tmp_path / "mine") == 1
    assert num_records(tmp_path / "default") == 5


async def test_chunk_above_the_quota_is_refused_and_evicts_nothing(disk, removed):
    await put(disk, 0, tenant="mine")
    large = make_chunk("large", tenant="mine", payload=bytes(QUOTA_SLOTS * BLOCK_BYTES))
    assert await disk.batched_put([large]) == [False]
    assert (disk.stats()["quota_refused_chunks"], removed) == (1, [])


async def test_writes_remove_expired_chunks(disk, clock, tmp_path):
    await put(disk, *range(5))
    clock.now += TTL_S
    await put(disk, "new")
    assert num_records(tmp_path) == 1
    assert disk.stats()["expired_chunks"] == 5
