"""Digests of whole files: read once, by one process, and again when a file may have changed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm import file_digests as module
from lmcache_core.integrations.vllm.file_digests import file_digests

from tests.fixtures.waiting import wait_until

LONG_AGO_S = 1_000_000_000
PATIENCE_S = 60.0


class Reads:
    """Counts the segments that are read.

    Attributes:
        before_each: Called before a segment is read.
    """

    def __init__(self) -> None:
        self.count = 0
        self.before_each: Callable[[], object] = lambda: None

    def hash(self, make: Callable[[], object]) -> Callable[[], object]:
        def noted() -> object:
            self.count += 1
            self.before_each()
            return make()

        return noted


@pytest.fixture(autouse=True)
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Files of any size are remembered, however young they are."""
    found = Reads()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MIN_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(module, "SETTLED_S", -LONG_AGO_S)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(module, "READ_BYTES", 300)
    monkeypatch.setattr(module.xxhash, "xxh3_128", found.hash(module.xxhash.xxh3_128))
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files in five segments."""
    folder = tmp_path / "model"
    folder.mkdir()
    paths = [folder / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (1100 * number))
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "lmcache"


@contextmanager
def locked(cache: Path) -> Iterator[Callable[[], None]]:
    """As if another process was reading the files; yields what ends that."""
    (lock,) = cache.glob("*.lock")
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(held, fcntl.LOCK_UN)


def test_pieces_of_a_file_are_told_apart(files: list[Path]) -> None:
    contents = [
        b"a" * 1000 + b"b" * 1000,
        b"b" * 1000 + b"a" * 1000,
        b"a" * 1000 + b"b" * 1000 + b"\0",
        b"",
        b"\0",
    ]
    found = set()
    for content in contents:
        files[0].write_bytes(content)
        found.add(file_digests(files[:1])[0])
    assert len(found) == len(contents)


def test_files_are_read_once(files: list[Path], reads: Reads) -> None:
    first = file_digests(files)
    assert reads.count == 5
    assert file_digests(files) == first
    assert reads.count == 5


def copy_with_times(path: Path) -> None:
    """The inode, and when it was changed, cannot be set."""
    stat, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(b"y" * stat.st_size)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), True),
        (lambda path: os.utime(path, (LONG_AGO_S, LONG_AGO_S)), False),
        (copy_with_times, True),
    ],
    ids=["content", "times", "copy"],
)
def test_file_that_may_have_changed_is_read_again(
    files: list[Path], reads: Reads, change: Callable[[Path], object], is_other: bool
) -> None:
    before = file_digests(files)
    change(files[1])
    assert (file_digests(files) != before) == is_other
    assert reads.count == 10


def test_recently_changed_file_is_not_remembered(
    files: list[Path], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the clock's tick would go unnoticed."""
    monkeypatch.setattr(module, "SETTLED_S", LONG_AGO_S)
    file_digests(files)
    file_digests(files)
    assert reads.count == 10


def test_file_that_changes_meanwhile_is_refused(files: list[Path], reads: Reads) -> None:
    reads.before_each = lambda: files[1].write_bytes(b"written meanwhile")
    with pytest.raises(LayoutError, match="changes while it is being read"):
        file_digests(files)


def test_concurrent_processes_read_once_and_log_their_progress(
    files: list[Path],
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "PROGRESS_S", 0.0)
    monkeypatch.setattr(module, "LOCK_POLL_S", 0.01)
    may_read, found = threading.Event(), list[list[str]]()
    reads.before_each = lambda: may_read.wait(PATIENCE_S)
    threads = [threading.Thread(target=lambda: found.append(file_digests(files))) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: "waiting for another process" in caplog.text)
    may_read.set()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4
    assert reads.count == 5
    lines = [record for record in caplog.records if record.msg.startswith("reading weights: gb=")]
    assert len(lines) == 5, "one for each segment"
    assert lines[-1].args == (3300 / 1e9, 3300 / 1e9)


def test_digests_of_another_process_are_used(
    files: list[Path], reads: Reads, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = file_digests(files)
    (remembered,) = cache.glob("*.json")
    content = remembered.read_bytes()
    remembered.unlink()
    with locked(cache) as unlock:

        def end_other(_: float) -> None:
            remembered.write_bytes(content)
            unlock()

        monkeypatch.setattr(module.time, "sleep", end_other)
        assert file_digests(files) == digests
    assert reads.count == 5


def test_caller_that_must_not_wait_reads_at_once(
    files: list[Path], reads: Reads, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = file_digests(files)
    (remembered,) = cache.glob("*.json")
    remembered.unlink()
    monkeypatch.setattr(module.time, "sleep", pytest.fail)
    with locked(cache):
        assert file_digests(files, lock_wait_s=0.0) == expected
        assert reads.count == 10
        assert file_digests(files, lock_wait_s=0.0) == expected
    assert reads.count == 10, "it is remembered all the same"


@pytest.mark.parametrize("damage", [b"", b"{}", b'[[[1,2,3,4,5],""]]', b"\xff"])
def test_damaged_memory_is_ignored(files: list[Path], cache: Path, damage: bytes) -> None:
    before = file_digests(files)
    (memory,) = cache.glob("*.json")
    memory.write_bytes(damage)
    assert file_digests(files) == before


def test_memory_that_other_users_can_write_is_ignored(
    files: list[Path], reads: Reads, cache: Path
) -> None:
    file_digests(files)
    cache.chmod(0o777)
    file_digests(files)
    assert reads.count == 10


def test_files_are_read_without_a_cache_directory(
    files: list[Path], reads: Reads, cache: Path
) -> None:
    cache.parent.write_text("a file is in its place")
    assert file_digests(files) == file_digests(files)
    assert reads.count == 10


def test_memory_is_bounded(files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    for count in (1, 2, 3):
        file_digests(files[:count])
    assert len(list(cache.glob("*.json"))) == 2
