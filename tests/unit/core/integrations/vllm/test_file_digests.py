"""Digests of whole files: read once, by one process, and again when a file may have changed."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm import file_digests as module
from lmcache_core.integrations.vllm.file_digests import file_digests

LONG_AGO_S = 1_000_000_000


@pytest.fixture(autouse=True)
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of any size are remembered, and settled at once; which segments were read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MIN_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(module, "SETTLED_S", -1.0)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(module, "READ_BYTES", 300)
    found: list[Path] = []
    digest = module._digest

    def noted(path: Path, begin: int) -> bytes:
        found.append(path)
        return digest(path, begin)

    monkeypatch.setattr(module, "_digest", noted)
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "model"
    folder.mkdir()
    paths = [folder / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (1100 * number))
    return paths


def test_pieces_of_a_file_are_told_apart(files: list[Path]) -> None:
    """Also where two of them change places, or zeros are added at the end."""
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


def test_files_are_read_once(files: list[Path], reads: list[Path]) -> None:
    first = file_digests(files)
    assert len(reads) == 5
    assert file_digests(files) == first
    assert len(reads) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"other"),
        lambda path: path.write_bytes(b"x" * path.stat().st_size),
        lambda path: os.utime(path, (LONG_AGO_S, LONG_AGO_S)),
    ],
)
def test_what_may_have_changed_is_read_again(
    files: list[Path], reads: list[Path], change: Callable[[Path], object]
) -> None:
    file_digests(files)
    reads.clear()
    change(files[1])
    digests = file_digests(files)
    assert reads
    assert digests == module._read(files)


def test_a_file_with_the_old_times_and_size_is_another_one(files: list[Path]) -> None:
    """As copied by a tool that keeps times: the inode, and when it was changed, cannot be set."""
    before, stat = file_digests(files), files[1].stat()
    other = files[1].with_suffix(".new")
    other.write_bytes(b"y" * stat.st_size)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(files[1])
    assert file_digests(files) != before


def test_what_was_changed_just_now_is_not_remembered(
    files: list[Path], reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the clock's tick would go unnoticed."""
    monkeypatch.setattr(module, "SETTLED_S", 60.0)
    file_digests(files)
    file_digests(files)
    assert len(reads) == 10


def test_processes_that_start_together_read_once(files: list[Path], reads: list[Path]) -> None:
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(file_digests(files))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(digests == found[0] for digests in found)
    assert len(reads) == 5


def test_what_another_process_is_reading_is_waited_for(
    files: list[Path], reads: list[Path], tmp_path: Path
) -> None:
    file_digests(files)
    (lock,) = (tmp_path / "cache" / "lmcache").glob("*.lock")
    remembered = lock.with_suffix(".json")
    content = remembered.read_bytes()
    remembered.unlink()
    reads.clear()
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        reader = threading.Thread(target=file_digests, args=(files,))
        reader.start()
        reader.join(0.5)
        assert reader.is_alive()
        remembered.write_bytes(content)
    reader.join(10)
    assert not reader.is_alive()
    assert not reads


def test_a_caller_that_must_not_wait_reads_what_another_process_is_reading(
    files: list[Path], reads: list[Path], tmp_path: Path
) -> None:
    expected = file_digests(files)
    (lock,) = (tmp_path / "cache" / "lmcache").glob("*.lock")
    lock.with_suffix(".json").unlink()
    reads.clear()
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begin = time.monotonic()
        assert file_digests(files, lock_wait_s=0.0) == expected
        assert time.monotonic() - begin < 10
    assert len(reads) == 5
    assert file_digests(files, lock_wait_s=0.0) == expected
    assert len(reads) == 5, "it is remembered all the same"


@pytest.mark.parametrize("damage", [b"", b"{}", b'[[[1,2,3,4,5],""]]', b"\xff"])
def test_a_damaged_memory_is_none(files: list[Path], tmp_path: Path, damage: bytes) -> None:
    before = file_digests(files)
    (memory,) = (tmp_path / "cache" / "lmcache").glob("*.json")
    memory.write_bytes(damage)
    assert file_digests(files) == before


def test_a_memory_that_others_can_write_is_not_believed(
    files: list[Path], reads: list[Path], tmp_path: Path
) -> None:
    file_digests(files)
    (tmp_path / "cache" / "lmcache").chmod(0o777)
    reads.clear()
    file_digests(files)
    assert len(reads) == 5


def test_without_a_cache_directory_files_are_read(
    files: list[Path], reads: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file is in its place")
    assert file_digests(files) == file_digests(files)
    assert len(reads) == 10


def test_the_memory_is_bounded(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    for count in (1, 2, 3):
        file_digests(files[:count])
    assert len(list((tmp_path / "cache" / "lmcache").glob("*.json"))) == 2


def test_a_file_that_changes_meanwhile_is_refused(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(path: Path, begin: int) -> bytes:
        path.write_bytes(b"written meanwhile")
        return b""

    monkeypatch.setattr(module, "_digest", change)
    with pytest.raises(LayoutError, match="changes while it is being read"):
        file_digests(files)


def test_long_work_tells_how_far_it_is(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "PROGRESS_S", 0.0)
    monkeypatch.setattr(module, "LOCK_POLL_S", 0.01)
    digest, may_read = module._digest, threading.Event()

    def held(path: Path, begin: int) -> bytes:
        assert may_read.wait(60)
        return digest(path, begin)

    monkeypatch.setattr(module, "_digest", held)
    threads = [threading.Thread(target=file_digests, args=(files,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60.0
    while "waiting for another process" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    may_read.set()
    for thread in threads:
        thread.join()
    told = [record for record in caplog.records if record.msg.startswith("reading weights: gb=")]
    assert len(told) == 5, "one for each segment"
    assert told[-1].args == (3300 / 1e9, 3300 / 1e9)
