"""The shared directory: several writers, damage, and failing file systems."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import HEAD_ALIGN_BYTES, Miss, MissReason
from lmcache_core.storage.disk import DiskFiles
from lmcache_core.storage.disk.backoff import MIN_PAUSE_S, WriteBackoff
from lmcache_core.storage.remote import RemoteOptions
from lmcache_core.storage.remote import file as file_tier
from lmcache_core.storage.remote.file import GROWING_S, STALE_S, FileBackend

from tests.fixtures.disk_tier import Clock
from tests.fixtures.loop_clock import FAR_S, LoopClock
from tests.fixtures.waiting import until
from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

TIMEOUT_S = 60.0
NUM_WRITERS = 3
WRITER = """
import asyncio, sys
from pathlib import Path
from lmcache_core.storage.remote import create_remote_backend
from tests.suites.chunks import make_chunk, make_payload

async def main(root):
    backend = create_remote_backend(f"file://{root}", timeout_s=60)
    await backend.open()
    for turn in range(10):
        chunks = [make_chunk(i, payload=make_payload(i, 50_000)) for i in range(8)]
        assert all(await backend.batched_put(chunks))
        await backend.batched_remove([chunk.key for chunk in chunks[turn % 2 :: 2]])
    assert all(await backend.batched_put(chunks))
    await backend.close()

asyncio.run(main(sys.argv[1]))
"""


async def opened(root, files=None, timeout_s=TIMEOUT_S):
    tier = FileBackend(root, RemoteOptions(timeout_s=timeout_s), files)
    await tier.open()
    return tier


@pytest.fixture
async def tier(tmp_path, files):
    backend = await opened(tmp_path, files)
    yield backend
    files.failing.clear()
    files.may_read.set()
    await backend.close()
    assert not list(tmp_path.glob(".tmp/*")), "a temporary file stayed"


@pytest.fixture
def arena():
    arena = Arena()
    yield arena
    assert arena.allocator.used_bytes == 0


async def get(tier, *names, arena=None):
    return [
        payload_of(result)
        for result in await tier.batched_get([make_key(name) for name in names], arena or Arena())
    ]


def record_of(root: Path) -> Path:
    [path] = root.rglob("*.kvr")
    return path


def make_old(path: Path, by_s: float = GROWING_S + 1) -> None:
    modified = path.stat().st_mtime - by_s
    os.utime(path, times=(modified, modified))


async def test_processes_share_what_they_write(tmp_path, tier):
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(NUM_WRITERS)
    ]
    arena, keys = Arena(), [make_key(i) for i in range(8)]
    while any(process.poll() is None for process in processes):
        for i, result in enumerate(await tier.batched_get(keys, arena)):
            assert payload_of(result) in (make_payload(i, 50_000), MissReason.NEVER_STORED)
    assert [process.wait() for process in processes] == [0] * NUM_WRITERS
    assert await get(tier, *range(8)) == [make_payload(i, 50_000) for i in range(8)]


async def test_damaged_file_is_removed_once_it_cannot_be_still_growing(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert path.exists()
    make_old(path)
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert not path.exists()
    assert await get(tier, "a") == [MissReason.NEVER_STORED]


NO_RECORDS: dict[str, Callable[[bytes], bytes]] = {
    "another record": lambda data: make_record("other"),
    "zeros": lambda data: bytes(len(data)),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("change", NO_RECORDS)
async def test_file_that_is_no_record_stays_counts_as_absent_and_is_replaced(
    tier, tmp_path, change
):
    """Another host or a server may be the reason; only its own digest proves damage."""
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    path.write_bytes(changed := NO_RECORDS[change](path.read_bytes()))
    make_old(path)
    [reason] = await get(tier, "a")
    assert reason in (MissReason.CORRUPT, MissReason.IDENTITY)
    assert path.read_bytes() == changed
    assert await tier.batched_contains([make_key("a")]) == [False]
    assert await tier.batched_put([make_chunk("a")]) == [True]
    assert await get(tier, "a") == [make_payload("a")]
    assert await tier.batched_contains([make_key("a")]) == [True]


class WrongOnce(DiskFiles):
    """Flips one bit in the first reads that contain it, as bad memory does.

    Args:
        at: Which byte of the file.
        num_wrong: How many reads.
    """

    def __init__(self, at: int, num_wrong: int = 1) -> None:
        self._at = at
        self._num_wrong = num_wrong

    def read(self, fd, buffer, at):
        num_read = super().read(fd, buffer, at)
        is_asked_for = (
            at > 0 or self._at < HEAD_ALIGN_BYTES
        )  # the first read returns more than the head
        if self._num_wrong and is_asked_for and at <= self._at < at + num_read:
            self._num_wrong -= 1
            memoryview(buffer)[self._at - at] ^= 1 << self._num_wrong
        return num_read


@pytest.mark.parametrize("num_wrong", [1, 2], ids=["right_again", "wrong_in_another_way"])
@pytest.mark.parametrize("at", [0, 30, 600], ids=["prefix", "header", "payload"])
async def test_file_that_reads_wrong_in_changing_ways_stays(tier, tmp_path, arena, at, num_wrong):
    await tier.batched_put([make_chunk("a")])
    make_old(record_of(tmp_path))
    unsound = await opened(tmp_path, WrongOnce(at, num_wrong))
    assert await get(unsound, "a", arena=arena) == [MissReason.UNAVAILABLE]
    assert (unsound.stats()["failed_reads"], unsound.stats()["corrupt_chunks"]) == (1, 0)
    assert await get(unsound, "a", arena=arena) == [make_payload("a")]
    await unsound.close()


class BadSectors(DiskFiles):
    """Cannot read the payload of some files.

    Attributes:
        bad: Their inode numbers.
    """

    def __init__(self) -> None:
        self.bad: set[int] = set()

    def read(self, fd, buffer, at):
        if at and os.fstat(fd).st_ino in self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, buffer, at)


@pytest.mark.parametrize("lossy", [False, True])
async def test_put_replaces_a_file_whose_payload_could_not_be_read(tmp_path, lossy):
    files, payload = BadSectors(), make_payload("new", 3000)
    tier = await opened(tmp_path, files)
    await tier.batched_put([make_chunk("a", lossy=lossy)])
    files.bad.add(record_of(tmp_path).stat().st_ino)
    assert await tier.batched_contains([make_key("a")]) == [True]
    assert await get(tier, "a") == [MissReason.UNAVAILABLE]
    assert await tier.batched_contains([make_key("a")]) == [False], "or it is not stored again"
    assert await tier.batched_put([make_chunk("a", payload=payload, lossy=lossy)]) == [True]
    assert await tier.batched_contains([make_key("a")]) == [True]
    assert await get(tier, "a") == [payload]
    await tier.close()


@pytest.mark.parametrize("is_readable", [True, False])
async def test_lossy_chunk_does_not_replace_a_lossless_file_that_could_not_be_read(
    tmp_path, is_readable
):
    files = BadSectors()
    tier = await opened(tmp_path, files)
    await tier.batched_put([make_chunk("a")])
    files.bad.add(record_of(tmp_path).stat().st_ino)
    assert await get(tier, "a") == [MissReason.UNAVAILABLE]
    if is_readable:
        files.bad.clear()
    await tier.batched_put([make_chunk("a", payload=b"x", lossy=True)])
    files.bad.clear()
    assert await get(tier, "a") == [make_payload("a")]
    await tier.close()


async def test_good_file_that_has_just_replaced_a_damaged_one_stays(tier, tmp_path, files):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    make_old(path)
    files.may_read.clear()
    seen = files.num_reads
    reading = asyncio.ensure_future(get(tier, "a"))
    await until(lambda: files.num_reads > seen)
    (tmp_path / "new").write_bytes(good)
    (tmp_path / "new").rename(path)
    files.may_read.set()
    assert await reading == [MissReason.CORRUPT]
    assert await get(tier, "a") == [make_payload("a")]


async def test_record_of_a_later_version_stays(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    record = bytearray(path.read_bytes())
    record[4] = 2
    path.write_bytes(record)
    make_old(path)
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert path.exists()
    assert await tier.batched_contains([make_key("a")]) == [True], "it is not stored again"


async def test_foreign_entries_in_place_of_a_record_are_misses(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    good = path.read_bytes()
    path.unlink()
    path.mkdir()
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert await tier.batched_contains([make_key("a")]) == [False]
    path.rmdir()
    (tmp_path / "elsewhere").write_bytes(good)
    path.symlink_to(tmp_path / "elsewhere")
    assert await get(tier, "a") == [MissReason.CORRUPT], "links are not followed"
    path.unlink()
    os.mkfifo(path)
    assert await get(tier, "a") == [MissReason.CORRUPT], "pipes are not waited for"
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"a file where a directory should be")
    assert await get(tier, "a") == [MissReason.NEVER_STORED]
    path.parent.unlink()


@pytest.mark.parametrize(
    ("operation", "code"),
    [("create", errno.EROFS), ("write", errno.ENOSPC), ("rename", errno.EACCES)],
)
async def test_directory_that_refuses_writes_keeps_serving_and_is_retried(
    tmp_path, files, monkeypatch, operation, code
):
    clock = Clock()
    monkeypatch.setattr(file_tier, "WriteBackoff", lambda: WriteBackoff(clock))
    tier = await opened(tmp_path, files)
    assert await tier.batched_put([make_chunk("before")]) == [True]
    files.failing = {operation: code}
    assert await tier.batched_put([make_chunk("a")]) == [False]
    files.failing.clear()
    assert await get(tier, "before", "a") == [make_payload("before"), MissReason.NEVER_STORED]
    assert await tier.batched_put([make_chunk("a")]) == [False], "no write is tried for a while"
    clock.now += MIN_PAUSE_S
    assert await tier.batched_put([make_chunk("a")]) == [True]
    await tier.close()


async def test_device_errors_make_writes_raise_and_reads_miss(tier, files, arena):
    await tier.batched_put([make_chunk("a")])
    files.failing = {"write": errno.EIO, "read": errno.ESTALE}
    chunks = [make_chunk(i, allocate=arena) for i in range(3)]
    with pytest.raises(UnavailableError, match="Input/output error"):
        await tier.batched_put(chunks)
    for chunk in chunks:
        chunk.release()
    assert await get(tier, "a", arena=arena) == [MissReason.UNAVAILABLE]
    await until(lambda: not arena.allocator.used_bytes)


async def test_directory_that_is_not_mounted_is_unavailable_and_not_created(tmp_path):
    root = tmp_path / "mount"
    tier = await opened(root)
    for call in (
        tier.batched_get([make_key(1)], Arena()),
        tier.batched_contains([make_key(1)]),
        tier.batched_put([make_chunk(1)]),
        tier.clear(),
    ):
        with pytest.raises(UnavailableError, match="mount: No such file"):
            await call
    assert not root.exists()
    root.mkdir()
    assert await tier.batched_put([make_chunk(1)]) == [True]
    assert await get(tier, 1) == [make_payload(1)]
    await tier.close()


async def test_directory_that_hangs_is_unavailable_or_late_and_leaks_nothing(
    tmp_path, files, tier, arena
):
    keys = [make_key(i) for i in range(20)]
    await tier.batched_put([make_chunk(i) for i in range(20)])
    hanging = await opened(tmp_path, files, timeout_s=0.1)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    files.may_read.clear()
    with pytest.raises(UnavailableError, match=r"no answer within 0\.1 s"):
        await hanging.batched_get(keys, arena)
    late = await hanging.batched_get(keys, arena, timeout_s=0.02)
    assert late == [Miss(MissReason.DEADLINE)] * 20
    files.may_read.set()
    await hanging.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_open


async def test_results_that_came_in_time_are_kept(tmp_path, files, arena, monkeypatch):
    monkeypatch.setattr(file_tier, "NUM_THREADS", 1)  # one chunk after the other
    clock = LoopClock()
    tier = await opened(tmp_path, files, timeout_s=2 * FAR_S)
    await tier.batched_put([make_chunk("a")])

    def allocate(num_bytes):
        files.may_read.clear()  # the head has been read; the payload does not come
        clock.jump()
        return arena(num_bytes)

    keys = [make_key("never"), make_key("a")]
    results = await tier.batched_get(keys, allocate, timeout_s=FAR_S)
    assert results == [Miss(MissReason.NEVER_STORED), Miss(MissReason.DEADLINE)]
    files.may_read.set()
    await until(lambda: not arena.allocator.used_bytes)
    await tier.close()


async def test_files_of_dead_writers_are_removed_and_those_of_live_ones_are_not(tmp_path):
    (tmp_path / ".tmp").mkdir()
    old, young = tmp_path / ".tmp" / "1-0.tmp", tmp_path / ".tmp" / "2-0.tmp"
    for path in (old, young):
        path.write_bytes(b"half a record")
    make_old(old, STALE_S + 60)
    tier = await opened(tmp_path)
    await until(lambda: not old.exists())
    await tier.close()
    assert young.exists()


async def test_clearing_leaves_foreign_files(tier, tmp_path):
    await tier.batched_put([make_chunk(i) for i in range(3)])
    among_records = next(tmp_path.rglob("*.kvr")).parent
    foreign = [tmp_path / "notes.txt", among_records / "notes.txt"]
    for path in foreign:
        path.write_bytes(b"mine")
    (among_records / f"{'0' * 64}.kvr").mkdir()
    os.mkfifo(among_records / f"{'1' * 64}.kvr")
    (tmp_path / os.fsdecode(b"\xff\xfe")).mkdir()
    assert await tier.clear() == 3
    assert all(path.exists() for path in foreign)


async def test_root_may_be_a_link_to_a_directory_but_not_a_file(tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    linked, wrong = await opened(tmp_path / "link"), await opened(tmp_path / "file")
    assert await linked.batched_put([make_chunk("a")]) == [True]
    assert await get(linked, "a", "never") == [make_payload("a"), MissReason.NEVER_STORED]
    for call in (wrong.batched_put([make_chunk("a")]), wrong.batched_contains([make_key("a")])):
        with pytest.raises(UnavailableError, match="Not a directory"):
            await call
    await linked.close()
    await wrong.close()


async def test_put_over_a_file_that_reads_wrong_once_does_not_remove_it(tier, tmp_path):
    class Full(WrongOnce):
        def create(self, path):
            raise OSError(errno.ENOSPC, "full")

    await tier.batched_put([make_chunk("a")])
    make_old(record_of(tmp_path))
    unsound = await opened(tmp_path, Full(30))
    assert await unsound.batched_put([make_chunk("a")]) == [False]
    await unsound.close()
    assert await get(tier, "a") == [make_payload("a")]
