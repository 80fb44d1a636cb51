"""An answer of the system about a file removes no record, and nothing is written below a volume
that is gone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.record import MissReason
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk import lock as lock_module
from lmcache_core.storage.disk.backoff import MAX_PAUSE_S
from lmcache_core.storage.disk.index import FULL_S
from lmcache_core.storage.disk.layout import BLOCK_BYTES
from lmcache_core.storage.eviction import TierLimits

from tests.fixtures.disk_tier import Clock, Opened, fill, get, look_again, num_records, put
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

NAMES = range(20)
TTL_S = 60.0
PAYLOADS = [make_payload(name) for name in NAMES]


class LyingFiles(DiskFiles):
    """Answers reads with other bytes, as a network file system or a faulty device may.

    Attributes:
        lie: Given the file's content and the buffer's size, returns the content to read from.
    """

    def __init__(self) -> None:
        self.lie: Callable[[bytes, int], bytes] | None = None

    def read(self, fd: int, buffer: bytearray | memoryview, at: int) -> int:
        view = memoryview(buffer).cast("B")
        if self.lie is None:
            return super().read(fd, view, at)
        got = self.lie(os.pread(fd, 1 << 20, 0), len(view))[at : at + len(view)]
        view[: len(got)] = got
        return len(got)


LIES: dict[str, Callable[[bytes, int], bytes]] = {
    "zeros": lambda record, size: bytes(len(record)),
    "nothing": lambda record, size: b"",
    "short": lambda record, size: record[:100],
    "cut": lambda record, size: record[:-1],
    "other": lambda record, size: make_record("other"),
    "page": lambda record, size: b"<html>" * 1000,
}


@pytest.fixture
def files() -> LyingFiles:
    return LyingFiles()


@pytest.mark.parametrize("when", ["reading", "starting"])
@pytest.mark.parametrize("lie", LIES)
async def test_other_bytes_in_place_of_a_record_remove_no_file(
    opened: Opened, tmp_path: Path, files: LyingFiles, lie: str, when: str
) -> None:
    await fill(tmp_path, *NAMES)
    if when == "starting":
        files.lie = LIES[lie]
    disk = await opened(tmp_path, files=files)
    files.lie = LIES[lie]
    assert not any(isinstance(result, bytes) for result in await get(disk, *NAMES))
    await look_again(disk)
    assert num_records(tmp_path) == len(NAMES)
    assert disk.stats()["used_bytes"] == len(NAMES) * BLOCK_BYTES, "they are charged"
    files.lie = None
    await look_again(disk)
    assert await get(disk, *NAMES) == PAYLOADS


async def test_digest_that_fails_once_costs_one_miss(
    opened: Opened, tmp_path: Path, files: LyingFiles
) -> None:
    await fill(tmp_path, "a")
    disk = await opened(tmp_path, files=files)

    def once(record: bytes, size: int) -> bytes:
        if size == len(make_payload("a")):
            files.lie = None
        return record[:-1] + bytes([record[-1] ^ 1])

    files.lie = once
    assert await get(disk, "a") == [MissReason.UNAVAILABLE]
    assert await get(disk, "a") == [make_payload("a")]
    assert disk.stats()["corrupt_chunks"] == 0


class TurningFiles(LyingFiles):
    """Changes within a second look: the first read of each file lies, later ones call `turned`.

    Attributes:
        seen: The files read in that look; None outside it.
    """

    def __init__(self, turned: Callable[[], None]) -> None:
        super().__init__()
        self._turned = turned
        self.seen: set[Path] | None = None

    def open(self, path: Path) -> int:
        if self.seen is not None and path.suffix == ".kvr":
            if path in self.seen:
                self.lie = None
                self._turned()
            self.seen.add(path)
        return super().open(path)


def out_of_descriptors() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("turned", [out_of_descriptors, lambda: None], ids=["unread", "right"])
async def test_file_that_reads_differently_at_the_second_look_is_not_forgotten(
    opened: Opened, tmp_path: Path, turned: Callable[[], None]
) -> None:
    await fill(tmp_path, *NAMES)
    files = TurningFiles(turned)
    files.lie = LIES["zeros"]
    disk = await opened(tmp_path, files=files)
    used_bytes = disk.stats()["used_bytes"]
    assert used_bytes > 0
    files.seen = set()
    await look_again(disk)
    assert disk.stats()["used_bytes"] == used_bytes
    files.seen = None
    await look_again(disk)
    assert await get(disk, *NAMES) == PAYLOADS
    assert disk.stats()["used_bytes"] == used_bytes


class SmallVolume(DiskFiles):
    """A volume of so many bytes and files, of which others take some; it counts its `*.kvr` and
    `*.tmp` files.

    Attributes:
        others_bytes: What others hold there.
        code: How it refuses.
        is_lying: Refuses everything.
    """

    def __init__(self, root: Path, num_bytes: int, num_files: int = 1 << 20) -> None:
        self._root = root
        self._num_bytes = num_bytes
        self._num_files = num_files
        self.others_bytes = 0
        self.code = errno.ENOSPC
        self.is_lying = False

    def create(self, path: Path) -> int:
        self._check(0, 1)
        return super().create(path)

    def write(self, fd: int, buffers: list[bytes | memoryview]) -> None:  # type: ignore[override]
        self._check(sum(len(buffer) for buffer in buffers), 0)
        super().write(fd, buffers)

    def _check(self, num_bytes: int, num_files: int) -> None:
        sizes = [
            -(-path.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES
            for pattern in ("*.kvr", "*.tmp")
            for path in self._root.rglob(pattern)
            if path.is_file()
        ]
        if (
            self.is_lying
            or sum(sizes) + num_bytes + self.others_bytes > self._num_bytes
            or len(sizes) + num_files > self._num_files
        ):
            raise OSError(self.code, os.strerror(self.code))


async def store(disk: DiskBackend, clock: Clock, *names: object) -> int:
    """Store chunks one after the other, each after a pause; return how many were kept."""
    num_kept = 0
    for name in names:
        [is_kept] = await disk.batched_put([make_chunk(name)])
        num_kept += is_kept
        clock.now += 1.0
    return num_kept


async def held(disk: DiskBackend, *names: object) -> list[object]:
    found = await get(disk, *names)
    return [name for name, data in zip(names, found, strict=True) if data == make_payload(name)]


@pytest.mark.parametrize(
    ("num_bytes", "num_files", "code"),
    [
        (10 * BLOCK_BYTES, 1 << 20, errno.ENOSPC),
        (10 * BLOCK_BYTES, 1 << 20, errno.EDQUOT),
        (1 << 30, 10, errno.ENOSPC),
    ],
    ids=["full", "quota", "inodes"],
)
async def test_volume_smaller_than_the_capacity_holds_the_newest_chunks(
    opened: Opened, tmp_path: Path, num_bytes: int, num_files: int, code: int
) -> None:
    volume, clock = SmallVolume(tmp_path, num_bytes, num_files), Clock()
    volume.code = code
    for _ in range(2):  # and after a restart
        disk = await opened(tmp_path, 1 << 30, files=volume, monotonic=clock)
        names = list(range(100))
        assert await store(disk, clock, *names) > 80
        assert await held(disk, *names[-5:]) == names[-5:]
        assert len(await held(disk, *names)) >= 8
        assert disk.stats()["is_failing"] == 0
        assert await disk.clear() > 0
        await disk.close()


async def test_volume_that_has_room_again_is_used_up_to_the_capacity(
    opened: Opened, tmp_path: Path
) -> None:
    volume, clock = SmallVolume(tmp_path, 40 * BLOCK_BYTES), Clock()
    volume.others_bytes = 30 * BLOCK_BYTES
    disk = await opened(tmp_path, 40 * BLOCK_BYTES, files=volume, monotonic=clock)
    names = [f"before-{i}" for i in range(30)]
    await store(disk, clock, *names)
    assert len(await held(disk, *names)) <= 10
    volume.others_bytes = 0
    clock.now += FULL_S
    later = [f"later-{i}" for i in range(30)]
    assert await store(disk, clock, *later) == 30
    assert await held(disk, *later) == later


async def test_volume_that_is_always_full_costs_a_few_chunks_at_most(
    opened: Opened, tmp_path: Path
) -> None:
    volume, clock = SmallVolume(tmp_path, 1 << 30), Clock()
    disk = await opened(tmp_path, 1 << 30, files=volume, monotonic=clock)
    await store(disk, clock, *NAMES)
    volume.is_lying = True
    for i in range(50):
        assert await store(disk, clock, f"more-{i}") == 0
        clock.now += MAX_PAUSE_S
    assert len(await held(disk, *NAMES)) >= len(NAMES) - 3
    volume.is_lying = False
    clock.now += MAX_PAUSE_S
    assert await store(disk, clock, "after") == 1


def content(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


async def test_nothing_is_written_or_removed_below_a_volume_that_is_gone(
    opened: Opened, tmp_path: Path
) -> None:
    root, away = tmp_path / "disk", tmp_path / "unmounted"
    clock, age = Clock(), Clock()
    limits = TierLimits(ttl_s=TTL_S)
    disk = await opened(root, limits=limits, clock=age, monotonic=clock)
    await put(disk, "a")
    root.rename(away)
    root.mkdir()  # the directory that the volume was mounted on
    assert await get(disk, "a") == [MissReason.UNAVAILABLE]
    age.now += TTL_S
    assert await get(disk, "a") == [MissReason.EXPIRED]
    assert await disk.batched_put([make_chunk("b")]) == [False]
    assert (disk.stats()["is_failing"], disk.stats()["failed_writes"]) == (1, 1)
    for call in (disk.batched_remove([make_key("a")]), disk.clear()):
        with pytest.raises(UnavailableError, match="volume is gone"):
            await call
    assert content(root) == set()
    age.now -= TTL_S
    root.rmdir()
    away.rename(root)
    assert await get(disk, "a") == [make_payload("a")]
    clock.now += MAX_PAUSE_S
    await put(disk, "b")
    assert await disk.batched_remove([make_key("a"), make_key("b")]) == 2


async def test_deleted_lock_is_taken_again_before_a_write(opened: Opened, tmp_path: Path) -> None:
    disk = await opened(tmp_path)
    (tmp_path / ".lock").unlink()
    await put(disk, "a")
    with pytest.raises(ConfigError, match="in use by another process"):
        await opened(tmp_path)
    await disk.close()
    await (await opened(tmp_path)).close()


async def test_process_that_lost_the_lock_to_another_writes_and_removes_nothing(
    opened: Opened,
    tmp_path: Path,
) -> None:
    disk = await opened(tmp_path)
    await put(disk, "a")
    (tmp_path / ".lock").unlink()
    other = await opened(tmp_path)
    assert await get(other, "a") == [make_payload("a")]
    before = content(tmp_path)
    assert await disk.batched_put([make_chunk("b")]) == [False]
    with pytest.raises(UnavailableError, match="another process"):
        await disk.batched_remove([make_key("a")])
    assert content(tmp_path) == before
    await other.close()
    assert await disk.batched_remove([make_key("a")]) == 1, "it is free again"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=["read_only", "denied"])
async def test_directory_that_may_not_be_written_is_reported_as_such(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refusing(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return os.open(path, flags, *more)

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return refusing if name == "open" else getattr(os, name)

    monkeypatch.setattr(lock_module, "os", Refusing())
    with pytest.raises(UnavailableError, match=os.strerror(code)):
        await opened(tmp_path)


async def test_file_that_was_read_as_no_record_makes_room_first_and_is_replaced(
    opened: Opened, tmp_path: Path, files: LyingFiles
) -> None:
    await fill(tmp_path, *range(4))
    disk = await opened(tmp_path, 4 * BLOCK_BYTES, files=files)
    files.lie = LIES["zeros"]
    assert await get(disk, 1, 2) == [MissReason.CORRUPT] * 2
    files.lie = None
    await put(disk, 1)
    assert await get(disk, 0, 1, 3) == [make_payload(name) for name in (0, 1, 3)]
    await put(disk, "new")
    assert await get(disk, 0, 1, 3, "new") == [make_payload(name) for name in (0, 1, 3, "new")]
