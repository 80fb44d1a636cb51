"""The disk tier against raw files: one file a chunk, written and read as a whole by one thread,
in turn with ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from lmcache_core.storage.disk import DiskBackend

from tests.bench.chunk_set import ChunkSet
from tests.bench.measure import ROUNDS, Figure, in_turn
from tests.bench.shape import CHUNK_BYTES, NUM_CHUNKS, TOTAL_BYTES


class RawFiles:
    """The same bytes in files without a format: a temporary name, one write, a rename.

    Args:
        root: Where they lie; made.
        payload: What each of them holds.
        fsync: Sync each file, and the directory behind each rename, as the tier does.
    """

    def __init__(self, root: Path, payload: memoryview, fsync: bool = False) -> None:
        root.mkdir()
        self._root = root
        self._payload = payload
        self._fsync = fsync
        self._target = memoryview(bytearray(CHUNK_BYTES))

    def write(self, turn: int) -> None:
        """Write every file."""
        for i in range(NUM_CHUNKS):
            fd = os.open(self._root / f"{i}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            at = 0
            while at < CHUNK_BYTES:
                at += os.write(fd, self._payload[at:])
            if self._fsync:
                os.fdatasync(fd)
            os.close(fd)
            (self._root / f"{i}.new").rename(self._root / f"{i}.raw")
            if self._fsync:
                _sync_directory(self._root)

    def read(self, turn: int) -> None:
        """Read every file into the same touched memory."""
        for i in range(NUM_CHUNKS):
            fd = os.open(self._root / f"{i}.raw", os.O_RDONLY)
            at = 0
            while at < CHUNK_BYTES:
                at += os.preadv(fd, [self._target[at:]], at)
            os.close(fd)

    def remove(self) -> None:
        """Remove every file."""
        for path in self._root.iterdir():
            path.unlink()


def disk_figures(directory: Path, rounds: int = ROUNDS) -> list[Figure]:
    """Store without and with fsync; retrieve from the page cache, and with a cold one."""
    chunks = ChunkSet()
    figures = _measure(directory / "lazy", chunks, False, rounds)
    return figures + _measure(directory / "synced", chunks, True, rounds)


def _measure(directory: Path, chunks: ChunkSet, fsync: bool, rounds: int) -> list[Figure]:
    """Retrieves are measured where nothing is synced: they do not differ."""
    directory.mkdir()
    raw = RawFiles(directory / "raw", chunks.payloads[0].byte_array, fsync)
    with asyncio.Runner() as runner:
        backend = DiskBackend(directory / "tier", 2 * TOTAL_BYTES, fsync=fsync)
        runner.run(backend.open())

        def make_room(turn: int) -> None:
            runner.run(backend.clear())
            raw.remove()

        def put(turn: int) -> None:
            if not all(runner.run(backend.batched_put(chunks.chunks(turn)))):
                raise AssertionError("a chunk was not stored")

        def get(turn: int) -> None:
            chunks.take(runner.run(backend.batched_get(chunks.keys(rounds), chunks.allocate)))

        def make_cold(turn: int) -> None:
            for path in directory.rglob("*.*"):
                drop_from_cache(path)

        how = "with fsync" if fsync else "without fsync"
        figures = [
            _figure(
                f"disk: store {how}",
                put,
                raw.write,
                make_room,
                rounds,
                "digest, reservation and rename beside the write",
            )
        ]
        if not fsync:
            note = "digest of every byte while it is in the processor's cache, four threads"
            figures.append(_figure("disk: retrieve, page cache", get, raw.read, None, rounds, note))
            figures.append(
                _figure(
                    "disk: retrieve, cold",
                    get,
                    raw.read,
                    make_cold,
                    rounds,
                    "the device; the digest runs beside it",
                )
            )
        make_room(0)
        runner.run(backend.close())
    return figures


def _figure(
    name: str,
    work: Callable[[int], object],
    limit: Callable[[int], object],
    prepare: Callable[[int], object] | None,
    rounds: int,
    note: str,
) -> Figure:
    seconds, beside = in_turn(work, limit, prepare, rounds)
    return Figure(
        name,
        TOTAL_BYTES,
        seconds,
        Figure(f"limit: {name}, raw files", TOTAL_BYTES, beside),
        note,
        beside,
    )


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def drop_from_cache(path: Path) -> None:
    """Leave nothing of a file in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
