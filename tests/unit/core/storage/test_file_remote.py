"""The shared directory: several writers, damage, and file systems in trouble."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import HEAD_ALIGN_BYTES, Chunk, Miss, MissReason
from lmcache_core.storage.disk import DiskFiles
from lmcache_core.storage.disk.backoff import MIN_PAUSE_S, WriteBackoff
from lmcache_core.storage.remote import RemoteOptions
from lmcache_core.storage.remote.file import GROWING_S, STALE_S, FileBackend

from tests.fixtures.wire import until
from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

TIMEOUT_S = 5.0
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


class Troubled(DiskFiles):
    """Fails the named operations with an error number, or holds them up."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.may_read = threading.Event()
        self.may_read.set()

    def _check(self, operation: str) -> None:
        if operation in self.failing:
            raise OSError(self.failing[operation], os.strerror(self.failing[operation]))

    def open(self, path):
        self._check("open")
        return super().open(path)

    def read(self, fd, buffer, at):
        self._check("read")
        assert self.may_read.wait(10)
        return super().read(fd, buffer, at)

    def stat(self, path):
        self._check("stat")
        return super().stat(path)

    def create(self, path):
        self._check("create")
        return super().create(path)

    def write(self, fd, buffers):
        if "write" in self.failing:
            super().write(fd, [buffers[0]])
        self._check("write")
        super().write(fd, buffers)

    def rename(self, source, target):
        self._check("rename")
        super().rename(source, target)


@pytest.fixture
def files():
    return Troubled()


@pytest.fixture
async def tier(tmp_path, files):
    backend = FileBackend(tmp_path, RemoteOptions(timeout_s=TIMEOUT_S), files)
    await backend.open()
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
    os.utime(path, times=(time.time() - by_s,) * 2)


async def test_processes_share_what_they_write(tmp_path, tier):
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(NUM_WRITERS)
    ]
    arena, seen = Arena(), set()
    while any(process.poll() is None for process in processes):
        for i, result in enumerate(await tier.batched_get([make_key(i) for i in range(8)], arena)):
            seen.add(type(result) if isinstance(result, Chunk) else result.reason)
            assert payload_of(result) in (make_payload(i, 50_000), MissReason.NEVER_STORED)
        await asyncio.sleep(0.005)
    assert [process.wait() for process in processes] == [0] * NUM_WRITERS
    assert Chunk in seen
    assert await tier.batched_contains([make_key(i) for i in range(8)]) == [True] * 8


async def test_a_lossless_chunk_takes_the_place_of_a_lossy_one_and_not_the_other_way(tier):
    lossless, lossy = make_payload("lossless"), make_payload("lossy", 3000)
    for payload, is_lossy, expected in (
        (lossy, True, lossy),
        (b"x", True, lossy),
        (lossless, False, lossless),
        (lossy, True, lossless),
    ):
        assert await tier.batched_put([make_chunk("a", payload=payload, lossy=is_lossy)]) == [True]
        assert await get(tier, "a") == [expected]


async def test_a_damaged_file_is_removed_once_it_cannot_be_one_that_still_grows(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert path.exists()
    make_old(path)
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert not path.exists()
    assert await get(tier, "a") == [MissReason.NEVER_STORED]


def other_record(path: Path) -> None:
    path.write_bytes(make_record("other"))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "change", [other_record, zeros, cut, empty], ids=lambda change: change.__name__
)
async def test_a_file_that_is_read_as_no_record_stays_is_absent_and_is_replaced(
    tier, tmp_path, change
):
    """Another host or a server may be the reason; only its own digest condemns a record."""
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    change(path)
    make_old(path)
    changed = path.read_bytes()
    [reason] = await get(tier, "a")
    assert reason in (MissReason.CORRUPT, MissReason.IDENTITY)
    assert path.read_bytes() == changed
    assert await tier.batched_contains([make_key("a")]) == [False]
    assert await tier.batched_put([make_chunk("a")]) == [True]
    assert await get(tier, "a") == [make_payload("a")]
    assert await tier.batched_contains([make_key("a")]) == [True]


async def test_a_root_that_is_a_file_is_an_unavailable_tier(tmp_path):
    root = tmp_path / "file"
    root.write_bytes(b"mine")
    tier = FileBackend(root, RemoteOptions())
    await tier.open()
    for call in (
        tier.batched_get([make_key("a")], Arena()),
        tier.batched_contains([make_key("a")]),
        tier.batched_put([make_chunk("a")]),
    ):
        with pytest.raises(UnavailableError, match="Not a directory"):
            await call
    await tier.close()


async def test_a_root_may_be_a_link_to_a_directory(tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    tier = FileBackend(tmp_path / "link", RemoteOptions())
    await tier.open()
    assert await get(tier, "a") == [MissReason.NEVER_STORED]
    assert await tier.batched_put([make_chunk("a")]) == [True]
    await tier.close()


class WrongOnce(DiskFiles):
    """Flips one bit of what it reads, as bad memory does, in so many reads that hold it.

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
        )  # the first read brings more than the head
        if self._num_wrong and is_asked_for and at <= self._at < at + num_read:
            self._num_wrong -= 1
            memoryview(buffer)[self._at - at] ^= 1 << self._num_wrong
        return num_read


@pytest.mark.parametrize("num_wrong", [1, 2], ids=["right_again", "wrong_in_another_way"])
@pytest.mark.parametrize("at", [0, 30, 600], ids=["prefix", "header", "payload"])
async def test_a_file_that_reads_wrong_in_changing_ways_stays(tier, tmp_path, arena, at, num_wrong):
    await tier.batched_put([make_chunk("a")])
    make_old(record_of(tmp_path))
    unsound = FileBackend(tmp_path, RemoteOptions(timeout_s=TIMEOUT_S), WrongOnce(at, num_wrong))
    await unsound.open()
    assert await get(unsound, "a", arena=arena) == [MissReason.UNAVAILABLE]
    assert (unsound.stats()["failed_reads"], unsound.stats()["corrupt_chunks"]) == (1, 0)
    assert await get(unsound, "a", arena=arena) == [make_payload("a")]
    await unsound.close()


async def test_a_put_over_a_file_that_reads_wrong_once_does_not_remove_it(tier, tmp_path):
    class Full(WrongOnce):
        def create(self, path):
            raise OSError(errno.ENOSPC, "full")

    await tier.batched_put([make_chunk("a")])
    make_old(record_of(tmp_path))
    unsound = FileBackend(tmp_path, RemoteOptions(timeout_s=TIMEOUT_S), Full(30))
    await unsound.open()
    assert await unsound.batched_put([make_chunk("a")]) == [False]
    await unsound.close()
    assert await get(tier, "a") == [make_payload("a")]


async def test_a_damaged_file_is_written_anew(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    path.write_bytes(path.read_bytes()[:600])
    assert await tier.batched_put([make_chunk("a")]) == [True]
    assert await get(tier, "a") == [make_payload("a")]


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
async def test_a_put_replaces_a_file_whose_payload_could_not_be_read(tmp_path, lossy):
    files, payload = BadSectors(), make_payload("new", 3000)
    tier = FileBackend(tmp_path, RemoteOptions(timeout_s=TIMEOUT_S), files)
    await tier.open()
    await tier.batched_put([make_chunk("a", lossy=lossy)])
    files.bad.add(record_of(tmp_path).stat().st_ino)
    assert await tier.batched_contains([make_key("a")]) == [True]
    assert await get(tier, "a") == [MissReason.UNAVAILABLE]
    assert await tier.batched_contains([make_key("a")]) == [False], "or it is not stored again"
    assert await tier.batched_put([make_chunk("a", payload=payload, lossy=lossy)]) == [True]
    assert await tier.batched_contains([make_key("a")]) == [True]
    assert await get(tier, "a") == [payload]
    await tier.close()


async def test_a_put_replaces_a_file_whose_payload_is_damaged_and_may_still_grow(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert await tier.batched_put([make_chunk("a")]) == [True]
    assert await get(tier, "a") == [make_payload("a")]


@pytest.mark.parametrize("is_readable", [True, False])
async def test_a_lossy_chunk_does_not_replace_a_lossless_file_that_could_not_be_read(
    tmp_path, is_readable
):
    files = BadSectors()
    tier = FileBackend(tmp_path, RemoteOptions(timeout_s=TIMEOUT_S), files)
    await tier.open()
    await tier.batched_put([make_chunk("a")])
    files.bad.add(record_of(tmp_path).stat().st_ino)
    assert await get(tier, "a") == [MissReason.UNAVAILABLE]
    if is_readable:
        files.bad.clear()
    await tier.batched_put([make_chunk("a", payload=b"x", lossy=True)])
    files.bad.clear()
    assert await get(tier, "a") == [make_payload("a")]
    await tier.close()


async def test_a_good_file_that_has_just_taken_the_name_of_a_damaged_one_stays(
    tier, tmp_path, files
):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    make_old(path)
    files.may_read.clear()
    reading = asyncio.ensure_future(get(tier, "a"))
    await asyncio.sleep(0.05)
    (tmp_path / "new").write_bytes(good)
    (tmp_path / "new").rename(path)
    files.may_read.set()
    assert await reading == [MissReason.CORRUPT]
    assert await get(tier, "a") == [make_payload("a")]


async def test_a_record_of_a_later_version_is_left_alone(tier, tmp_path):
    await tier.batched_put([make_chunk("a")])
    path = record_of(tmp_path)
    record = bytearray(path.read_bytes())
    record[4] = 2
    path.write_bytes(record)
    make_old(path)
    assert await get(tier, "a") == [MissReason.CORRUPT]
    assert path.exists()


async def test_every_byte_of_a_record_flipped_is_a_miss(tier, tmp_path, arena):
    await tier.batched_put([make_chunk("a", payload=make_payload("a", 100))])
    path = record_of(tmp_path)
    record = path.read_bytes()
    for at in range(len(record)):
        path.write_bytes(record[:at] + bytes([record[at] ^ 0x10]) + record[at + 1 :])
        assert await get(tier, "a", arena=arena) == [MissReason.CORRUPT], f"byte {at}"
    path.write_bytes(record)
    assert await get(tier, "a", arena=arena) == [make_payload("a", 100)]
    assert tier.stats()["corrupt_chunks"] == len(record)


async def test_foreign_things_in_the_place_of_a_record_are_misses(tier, tmp_path):
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
    [
        ("create", errno.EROFS),
        ("write", errno.ENOSPC),
        ("write", errno.EDQUOT),
        ("rename", errno.EACCES),
    ],
)
async def test_a_directory_that_takes_no_more_keeps_serving_and_is_tried_again(
    tier, files, operation, code
):
    now = [100.0]
    tier._directory._backoff = WriteBackoff(lambda: now[0])
    assert await tier.batched_put([make_chunk("before")]) == [True]
    files.failing = {operation: code}
    assert await tier.batched_put([make_chunk("a")]) == [False]
    files.failing.clear()
    assert await get(tier, "before", "a") == [make_payload("before"), MissReason.NEVER_STORED]
    assert await tier.batched_put([make_chunk("a")]) == [False], "it is not asked for a while"
    now[0] += MIN_PAUSE_S
    assert await tier.batched_put([make_chunk("a")]) == [True]


@pytest.mark.parametrize("operation", ["create", "write", "rename"])
async def test_a_write_that_fails_otherwise_says_that_the_tier_is_in_trouble(
    tier, files, arena, operation
):
    files.failing = {operation: errno.EIO}
    chunks = [make_chunk(i, allocate=arena) for i in range(3)]
    with pytest.raises(UnavailableError, match="Input/output error"):
        await tier.batched_put(chunks)
    for chunk in chunks:
        chunk.release()
    await until(lambda: not arena.allocator.used_bytes)


@pytest.mark.parametrize("operation", ["open", "read"])
async def test_a_read_that_fails_is_a_miss_for_want_of_the_tier(tier, files, arena, operation):
    await tier.batched_put([make_chunk("a")])
    files.failing = {operation: errno.ESTALE}
    assert await get(tier, "a", arena=arena) == [MissReason.UNAVAILABLE]


async def test_a_directory_that_is_not_mounted_is_unavailable_and_is_not_made(tmp_path):
    root = tmp_path / "mount"
    tier = FileBackend(root, RemoteOptions(timeout_s=TIMEOUT_S))
    await tier.open()
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


async def test_what_does_not_answer_is_unavailable_or_late_and_leaks_nothing(
    tmp_path, files, arena
):
    writer = FileBackend(tmp_path, RemoteOptions())
    await writer.open()
    keys = [make_key(i) for i in range(20)]
    await writer.batched_put([make_chunk(i) for i in range(20)])
    await writer.close()
    tier = FileBackend(tmp_path, RemoteOptions(timeout_s=0.1), files)
    await tier.open()
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    files.may_read.clear()
    with pytest.raises(UnavailableError, match=r"no answer within 0\.1 s"):
        await tier.batched_get(keys, arena)
    assert await tier.batched_get(keys, arena, timeout_s=0.02) == [Miss(MissReason.DEADLINE)] * 20
    files.may_read.set()
    await tier.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_open


async def test_what_came_in_time_is_kept(tier, files, arena):
    await tier.batched_put([make_chunk("a")])

    def allocate(num_bytes):
        files.may_read.clear()  # the head has been read, the payload does not come
        return arena(num_bytes)

    results = await tier.batched_get([make_key("never"), make_key("a")], allocate, timeout_s=0.5)
    assert results == [Miss(MissReason.NEVER_STORED), Miss(MissReason.DEADLINE)]
    files.may_read.set()
    await until(lambda: not arena.allocator.used_bytes)


async def test_what_dead_writers_left_is_cleared_away_and_what_others_write_is_not(tmp_path):
    (tmp_path / ".tmp").mkdir()
    old, young = tmp_path / ".tmp" / "1-0.tmp", tmp_path / ".tmp" / "2-0.tmp"
    for path in (old, young):
        path.write_bytes(b"half a record")
    make_old(old, STALE_S + 60)
    tier = FileBackend(tmp_path, RemoteOptions())
    await tier.open()
    await until(lambda: not old.exists())
    await tier.close()
    assert young.exists()


async def test_clearing_leaves_foreign_files(tier, tmp_path):
    await tier.batched_put([make_chunk(i) for i in range(3)])
    foreign = [tmp_path / "notes.txt", record_of_any(tmp_path).parent / "notes.txt"]
    for path in foreign:
        path.write_bytes(b"mine")
    (tmp_path / "lost+found").mkdir()
    named_like_records = record_of_any(tmp_path).parent
    (named_like_records / f"{'0' * 64}.kvr").mkdir()
    os.mkfifo(named_like_records / f"{'1' * 64}.kvr")
    for name in (b"\xff\xfe", "ü".encode() * 100):
        (tmp_path / os.fsdecode(name)).mkdir()
    assert await tier.clear() == 3
    assert all(path.exists() for path in foreign)


def record_of_any(root: Path) -> Path:
    return next(root.rglob("*.kvr"))


async def test_a_tier_that_is_not_open_is_unavailable(tmp_path):
    tier = FileBackend(tmp_path, RemoteOptions())
    await tier.close()
    for call in (
        tier.batched_get([], Arena()),
        tier.batched_put([]),
        tier.batched_contains([make_key(1)]),
    ):
        with pytest.raises(UnavailableError):
            await call
