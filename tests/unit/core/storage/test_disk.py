from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.backoff import MIN_PAUSE_S
from lmcache_core.storage.disk.layout import charged_bytes, tenant_directory, tenant_of

from tests.fixtures.disk_tier import TroubledFiles, put
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

CHARGE = charged_bytes(512 + 1000)
NUM_SLOTS = 4
PATIENCE_S = 30.0
"""Only a hang takes so long."""
CAPACITY_BYTES = CHARGE * NUM_SLOTS
ARENA = ArenaAllocator.anonymous(1 << 20)


def allocate(num_bytes):
    return ARENA.allocate((num_bytes,), None)


def taken_bytes(root: Path) -> int:
    return sum(
        charged_bytes(path.stat().st_size)
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock"
    )


@pytest.fixture
def removed():
    return []


@pytest.fixture
async def disk(tmp_path, removed):
    backend = DiskBackend(tmp_path, CAPACITY_BYTES, on_removed=removed.append)
    await backend.open()
    yield backend
    await backend.close()
    backend.check_integrity()
    assert ARENA.used_bytes == 0


async def get(disk: DiskBackend, *names: object) -> list[bytes | MissReason]:
    return [
        payload_of(result)
        for result in await disk.batched_get([make_key(name) for name in names], allocate)
    ]


async def test_the_least_recently_used_chunk_makes_room(disk, removed, tmp_path):
    await put(disk, *range(NUM_SLOTS))
    await get(disk, 0)
    await put(disk, "one more")
    await asyncio.sleep(0)
    assert removed == [make_key(1)]
    assert await get(disk, 0, 1, "one more") == [
        make_payload(0),
        MissReason.EVICTED,
        make_payload("one more"),
    ]
    assert disk.stats()["evicted_chunks"] == 1
    assert taken_bytes(tmp_path) == disk.stats()["used_bytes"] == CAPACITY_BYTES


async def test_the_capacity_also_bounds_what_is_being_written(tmp_path):
    class Watched(DiskFiles):
        peak = 0
        names = threading.Lock()

        def write(self, fd, buffers):
            super().write(fd, buffers)
            with self.names:
                self.peak = max(self.peak, taken_bytes(tmp_path))

        def rename(self, source, target):
            with self.names:
                super().rename(source, target)

        def unlink(self, path):
            with self.names:
                super().unlink(path)

    files = Watched()
    disk = DiskBackend(tmp_path, CAPACITY_BYTES, files=files)
    await disk.open()
    await asyncio.gather(*(disk.batched_put([make_chunk(i), make_chunk(-i)]) for i in range(1, 20)))
    await disk.close()
    assert 2 * CHARGE < files.peak <= CAPACITY_BYTES
    disk.check_integrity()
    assert disk.stats()["reserved_bytes"] == 0


async def test_a_chunk_above_the_capacity_is_refused_and_evicts_nothing(disk):
    await put(disk, 0)
    assert await disk.batched_put([make_chunk("large", payload=bytes(CAPACITY_BYTES))]) == [False]
    assert await get(disk, 0) == [make_payload(0)]


async def test_a_lossless_chunk_takes_the_place_of_a_lossy_one_and_not_the_other_way(
    disk, tmp_path
):
    lossless, lossy = make_payload("lossless"), make_payload("lossy", 3000)
    for payload, is_lossy, expected in (
        (lossy, True, lossy),
        (b"x", True, lossy),
        (lossless, False, lossless),
        (lossy, True, lossless),
    ):
        assert await disk.batched_put([make_chunk("a", payload=payload, lossy=is_lossy)]) == [True]
        assert await get(disk, "a") == [expected]
    assert disk.stats()["used_bytes"] == taken_bytes(tmp_path) == CHARGE


class HeldWrites(DiskFiles):
    """Each write waits until it is let go; later ones are let go first if so wanted."""

    def __init__(self):
        self.may_write = []

    def write(self, fd, buffers):
        self.may_write.append(may_go_on := threading.Event())
        assert may_go_on.wait(30)
        super().write(fd, buffers)


@pytest.mark.parametrize("is_lossy", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_writes_of_a_chunk_the_better_or_the_first_to_end_is_served(
    tmp_path, is_lossy, first
):
    files = HeldWrites()
    disk = DiskBackend(tmp_path, CAPACITY_BYTES, files=files)
    await disk.open()
    puts = []
    for i in range(2):
        chunk = make_chunk("a", payload=make_payload(i), lossy=is_lossy[i])
        puts.append(asyncio.create_task(disk.batched_put([chunk])))
        async with asyncio.timeout(10):
            while len(files.may_write) <= i:
                await asyncio.sleep(0.001)
    for i in (first, 1 - first):
        files.may_write[i].set()
        assert await puts[i] == [True]
    is_replaced = is_lossy[first] and not is_lossy[1 - first]
    assert await get(disk, "a") == [make_payload(1 - first if is_replaced else first)]
    assert disk.stats()["used_bytes"] == taken_bytes(tmp_path) == CHARGE
    disk.check_integrity()
    await disk.close()


async def test_a_write_that_another_has_overtaken_does_not_bring_back_what_was_removed(tmp_path):
    files = HeldWrites()
    disk = DiskBackend(tmp_path, CAPACITY_BYTES, files=files)
    await disk.open()
    puts = [asyncio.create_task(disk.batched_put([make_chunk("a")])) for _ in range(2)]
    async with asyncio.timeout(10):
        while len(files.may_write) < 2:
            await asyncio.sleep(0.001)
    files.may_write[0].set()
    await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    assert await disk.batched_remove([make_key("a")]) == 1
    files.may_write[1].set()
    await asyncio.wait(puts)
    assert sorted(kept for put in puts for kept in put.result()) == [False, True]
    assert await get(disk, "a") == [MissReason.NEVER_STORED]
    assert disk.stats()["used_bytes"] == taken_bytes(tmp_path) == 0
    await disk.close()


async def test_a_file_that_somebody_removed_is_a_miss_and_is_forgotten(disk, removed, tmp_path):
    await put(disk, "a")
    for path in tmp_path.rglob("*.kvr"):
        path.unlink()
    assert await get(disk, "a") == [MissReason.NEVER_STORED]
    await asyncio.sleep(0)
    assert removed == [make_key("a")]
    assert disk.stats()["missing_files"] == 1
    assert disk.stats()["used_bytes"] == 0
    await put(disk, "a")
    assert await get(disk, "a") == [make_payload("a")]


async def test_a_directory_that_somebody_removed_is_made_again(disk, tmp_path):
    await put(disk, "a")
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    await put(disk, "b")
    assert await get(disk, "b") == [make_payload("b")]


async def test_a_damaged_file_is_set_aside_and_its_space_is_used_when_needed(
    disk, removed, tmp_path
):
    await put(disk, *range(NUM_SLOTS))
    [path] = [
        path for path in tmp_path.rglob("*.kvr") if path.read_bytes()[512:] == make_payload(2)
    ]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await get(disk, 2) == [MissReason.CORRUPT]
    await asyncio.sleep(0)
    assert removed == [make_key(2)]
    assert (
        len(list((tmp_path / ".bad").iterdir()))
        == disk.stats()["quarantined_files"]
        == disk.stats()["corrupt_chunks"]
        == 1
    )
    assert disk.stats()["used_bytes"] == CAPACITY_BYTES
    await put(disk, 2)
    assert list((tmp_path / ".bad").iterdir()) == []
    assert await get(disk, *range(NUM_SLOTS)) == [make_payload(i) for i in range(NUM_SLOTS)]


async def test_no_more_than_a_few_damaged_files_are_kept(tmp_path):
    disk = DiskBackend(tmp_path, 100 * CHARGE)
    await disk.open()
    await put(disk, *range(20))
    for path in tmp_path.rglob("*.kvr"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await get(disk, *range(20)) == [MissReason.CORRUPT] * 20
    await disk.close()
    assert len(list((tmp_path / ".bad").iterdir())) == 8


async def test_a_second_owner_is_refused_with_the_remedy(disk, tmp_path):
    other = DiskBackend(tmp_path, CAPACITY_BYTES)
    with pytest.raises(
        ConfigError, match=r"in use by another process \(pid \d+\): give each process a directory"
    ):
        await other.open()
    await put(disk, "a")
    await disk.close()
    again = DiskBackend(tmp_path, CAPACITY_BYTES)
    await again.open()
    assert await get(again, "a") == [make_payload("a")]
    await again.close()


async def test_a_path_that_cannot_be_a_directory_is_unavailable(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnavailableError, match="file"):
        await DiskBackend(tmp_path / "file", CAPACITY_BYTES).open()


async def test_a_directory_that_cannot_be_read_is_unavailable(tmp_path):
    files = TroubledFiles({"list_directory": errno.EACCES})
    disk = DiskBackend(tmp_path, CAPACITY_BYTES, files=files)
    with pytest.raises(UnavailableError, match="Permission denied"):
        await disk.open()
    again = DiskBackend(tmp_path, CAPACITY_BYTES)
    await again.open()
    await again.close()


async def test_nobody_else_may_look_into_the_directory(tmp_path):
    disk = DiskBackend(tmp_path / "made", CAPACITY_BYTES)
    await disk.open()
    await put(disk, "a")
    await disk.close()
    assert (tmp_path / "made").stat().st_mode & 0o007 == 0
    assert all(path.stat().st_mode & 0o007 == 0 for path in tmp_path.rglob("*.kvr"))


def test_a_capacity_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be positive"):
        DiskBackend(tmp_path, 0)


async def test_a_closed_tier_is_unavailable(tmp_path):
    disk = DiskBackend(tmp_path, CAPACITY_BYTES)
    await disk.open()
    await put(disk, "a")
    await disk.close()
    with pytest.raises(UnavailableError):
        await get(disk, "a")
    with pytest.raises(UnavailableError):
        await disk.batched_put([make_chunk("b")])


class RecordedSyncs(DiskFiles):
    """Remembers what was synced; `failing` directories are not."""

    def __init__(self):
        self.calls = []
        self.failing = set()

    def sync(self, fd):
        self.calls.append("sync")
        super().sync(fd)

    def rename(self, source, target):
        super().rename(source, target)
        self.calls.append("rename")

    def sync_directory(self, path):
        if path in self.failing:
            raise OSError(errno.EIO, "injected")
        self.calls.append(path)
        super().sync_directory(path)


async def test_fsync_comes_before_the_name_and_again_behind_it(tmp_path):
    files = RecordedSyncs()
    disk = DiskBackend(tmp_path / "new" / "root", CAPACITY_BYTES, fsync=True, files=files)
    await disk.open()
    await put(disk, "a")
    shard = disk._layout.record(make_key("a")).parent
    assert files.calls[:3] == ["sync", "rename", shard]
    above = [*shard.parents[:3], tmp_path]
    assert files.calls[3 : 3 + len(above)] == above, "the names of new directories count too"
    files.calls.clear()
    await disk.batched_remove([make_key("a")])
    await put(disk, "a")
    assert files.calls == ["sync", "rename", shard]
    await disk.close()


async def test_a_name_that_could_not_be_synced_is_synced_by_the_next_write(tmp_path):
    files = RecordedSyncs()
    disk = DiskBackend(tmp_path / "root", CAPACITY_BYTES, fsync=True, files=files)
    await disk.open()
    tenant = disk._layout.record(make_key("a")).parent.parent
    files.failing = {tenant}
    await put(disk, "a", is_kept=False)
    files.failing = set()
    files.calls.clear()
    await disk.batched_remove([make_key("a")])
    await asyncio.sleep(MIN_PAUSE_S)
    await put(disk, "a")
    assert tenant in files.calls
    await disk.close()


async def test_a_store_of_a_record_whose_name_is_not_synced_yet_syncs_it_itself(tmp_path):
    class FirstSyncHangs(RecordedSyncs):
        def __init__(self):
            super().__init__()
            self.shard = None
            self.hangs, self.may_continue = threading.Event(), threading.Event()

        def sync_directory(self, path):
            if path == self.shard and not self.hangs.is_set():
                self.hangs.set()
                assert self.may_continue.wait(60)
            super().sync_directory(path)

    files = FirstSyncHangs()
    disk = DiskBackend(tmp_path / "root", CAPACITY_BYTES, fsync=True, files=files)
    await disk.open()
    files.shard = disk._layout.record(make_key("a")).parent
    first = asyncio.create_task(put(disk, "a"))
    assert await asyncio.to_thread(files.hangs.wait, 60)
    await put(disk, "a")
    assert files.shard in files.calls, "reported as stored before its name was on the device"
    files.may_continue.set()
    await first
    files.calls.clear()
    await put(disk, "a")
    assert not files.calls, "a synced name costs nothing more"
    await disk.close()


async def test_names_that_an_earlier_process_did_not_sync_are_synced(tmp_path):
    earlier = DiskBackend(tmp_path / "root", CAPACITY_BYTES)
    await earlier.open()
    await put(earlier, "a")
    await earlier.batched_remove([make_key("a")])
    await earlier.close()
    files = RecordedSyncs()
    disk = DiskBackend(tmp_path / "root", CAPACITY_BYTES, fsync=True, files=files)
    await disk.open()
    await put(disk, "a")
    shard = disk._layout.record(make_key("a")).parent
    assert {shard, *shard.parents[:3]} <= set(files.calls)
    await disk.close()


async def test_a_record_of_an_earlier_process_is_synced_when_it_is_stored_again(tmp_path):
    earlier = DiskBackend(tmp_path / "root", CAPACITY_BYTES)
    await earlier.open()
    await put(earlier, "a")
    await earlier.close()
    files = RecordedSyncs()
    disk = DiskBackend(tmp_path / "root", CAPACITY_BYTES, fsync=True, files=files)
    await disk.open()
    await put(disk, "a")
    shard = disk._layout.record(make_key("a")).parent
    assert files.calls[:2] == ["sync", shard]
    files.calls.clear()
    files.failing = {shard}
    await put(disk, "a")
    assert files.calls == []
    await disk.close()


async def test_a_stalled_disk_stops_only_its_readers(tmp_path):
    may_go_on, begun = threading.Event(), threading.Semaphore(0)

    class Stalled(DiskFiles):
        def read(self, fd, buffer, at):
            begun.release()
            may_go_on.wait(2 * PATIENCE_S)
            return super().read(fd, buffer, at)

    disk = DiskBackend(tmp_path, CAPACITY_BYTES, files=Stalled(), num_threads=2)
    await disk.open()
    await put(disk, *range(NUM_SLOTS))
    reading = asyncio.create_task(get(disk, *range(NUM_SLOTS)))
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S), "no read begins"
    async with asyncio.timeout(PATIENCE_S):
        assert await disk.batched_contains([make_key(0)]) == [True]
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert ARENA.used_bytes == 2 * 1024, (
        "reads that began hold their memory until they end, the others have given it back"
    )
    may_go_on.set()
    assert await get(disk, 0) == [make_payload(0)]
    await disk.close()
    assert ARENA.used_bytes == 0


@pytest.mark.parametrize("tenant", ["a", "a.b-c_d", "A/../b", ".", "..", "%2E", "ü b", "x" * 255])
def test_a_tenant_has_one_directory_and_that_directory_one_tenant(tenant):
    name = tenant_directory(tenant)
    assert Path(name).name == name
    assert not name.startswith(".")
    assert tenant_of(name) == tenant


@pytest.mark.parametrize("name", ["", ".tmp", "lost found", "%2e", "a%2Eb"])
def test_other_directories_belong_to_nobody(name):
    assert tenant_of(name) is None


async def test_a_tenant_without_a_possible_directory_is_not_kept(disk):
    chunks = [make_chunk("a", tenant=tenant) for tenant in ("", "x" * 256)]
    assert await disk.batched_put(chunks) == [False, False]
    assert disk.stats()["rejected_writes"] == 2
    results = await disk.batched_get([chunk.key for chunk in chunks], allocate)
    assert not any(isinstance(result, Chunk) for result in results)
