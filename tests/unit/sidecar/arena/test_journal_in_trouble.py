"""A journal that cannot be written, is long, or is rewritten: the sidecar serves on, and the next
start recovers nothing wrong.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import CapacityError, ConfigError
from lmcache_core.memory import MemoryObj
from lmcache_core.memory.arena_locks import join_generation
from lmcache_sidecar.arena import journal
from lmcache_sidecar.arena.journal import FILE_NAME, JournalFile

from tests.fixtures.arena import ARENA_BYTES, ArenaStart, is_recorded, leave, names_of, recovered
from tests.suites.chunks import make_key


@contextmanager
def full_volume(num_bytes: int = 0) -> Iterator[None]:
    """Files of this process that grow beyond that size cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_journal_that_cannot_be_written_is_abandoned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = ArenaStart(tmp_path)
    client = join_generation(tmp_path, start.owner.arena.generation)
    start.recover()
    start.store("a")
    with full_volume():
        assert start.store("b")
        (lent,) = start.reserve(1000)
        start.look()
    assert not is_recorded(start)
    assert not (tmp_path / FILE_NAME).exists(), "the next start must not believe it"
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [
        logging.ERROR
    ], "said once"
    assert start.served() == names_of(start, "ab")
    start.kill()
    with recovered(tmp_path) as second:
        assert second.served() == {}
        lent.byte_array[:] = b"\xee" * 1000
        assert not any(second.owner.arena.load_view)
        client.release()


def test_journal_is_begun_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.0)
    start = ArenaStart(tmp_path)
    start.recover()
    with full_volume():
        start.store("a")
        (lent,) = start.reserve(1000)
        start.look()
        assert not is_recorded(start)
    start.look()
    assert is_recorded(start)
    start.store("b")
    client = join_generation(tmp_path, start.owner.arena.generation)
    start.kill()
    with recovered(tmp_path) as second:
        second.look()
        assert second.served() == names_of(second, "ab")
        assert second.owner.lent_bytes == lent.metadata.phy_size
        client.release()


def test_start_that_cannot_write_a_journal_serves_and_leaves_nothing(tmp_path: Path) -> None:
    leave(tmp_path, "a")
    with full_volume():
        second = ArenaStart(tmp_path)
        second.recover()
    assert second.served() == names_of(second, "a")
    assert not is_recorded(second)
    assert second.store("b")
    second.kill()
    third = ArenaStart(tmp_path)
    assert third.owner.arena.inode != second.owner.arena.inode
    third.stop()


def test_journal_that_can_neither_be_written_nor_removed_ends_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would believe it, and hand out what clients write to."""
    monkeypatch.setattr(journal, "RETRY_S", 0.0)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "not permitted")

    with recovered(tmp_path) as start:
        start.store("a")
        memory = start.hot.allocate(1000)
        assert memory is not None
        with monkeypatch.context() as patch, full_volume():
            patch.setattr(Path, "unlink", refuse)
            patch.setattr(os, "pwrite", refuse)
            assert not start.journal.reserved([memory])
            start.look()
            assert not start.journal.reserved([memory])
        assert start.served() == names_of(start, "a")
        start.look()
        assert start.journal.reserved([memory])
        memory.ref_count_down()


def test_journal_that_cannot_be_removed_is_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ArenaStart(tmp_path)
    start.store("a")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "not permitted")

    with monkeypatch.context() as patch, full_volume(16):
        patch.setattr(Path, "unlink", refuse)
        assert start.store("b")
    assert (tmp_path / FILE_NAME).exists()
    start.kill()
    second = ArenaStart(tmp_path)
    assert second.owner.arena.inode != start.owner.arena.inode
    second.stop()


def test_a_journal_of_another_arena_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ConfigError, match=r"kv\.journal"):
        ArenaStart(tmp_path)
    (tmp_path / FILE_NAME).rmdir()
    ArenaStart(tmp_path).stop()


PASSING = [errno.EMFILE, errno.EACCES, errno.EIO]
"""Errors of the environment, which are no evidence about the file."""


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [FILE_NAME, "kv.arena"])
def test_start_that_cannot_open_a_file_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    leave(tmp_path, "ab")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing_for(tmp_path / name, code, os.open))
        with pytest.raises(CapacityError, match=name):
            ArenaStart(tmp_path)
    assert_nothing_is_lost(tmp_path)


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["statvfs", "fstat", "fchmod", "lstat"])
def test_start_that_cannot_stat_a_file_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    start = ArenaStart(tmp_path)
    start.store("a")
    start.store("b")
    client = join_generation(tmp_path, start.owner.arena.generation)
    (lent,) = start.reserve(1000)
    start.kill()
    failing = failing_for(None, code, getattr(os, call))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        if call == "lstat":  # also as `Path` spells it
            patch.setattr(
                os,
                "stat",
                failing_for(
                    tmp_path / f"{start.owner.arena.generation:016x}.generation", code, os.stat
                ),
            )
            patch.setattr(Path, "lstat", failing)
        with pytest.raises((CapacityError, ConfigError)):
            ArenaStart(tmp_path)
    client.release()
    assert lent.byte_array[:] is not None
    assert_nothing_is_lost(tmp_path)


def assert_nothing_is_lost(directory: Path) -> None:
    with recovered(directory) as second:
        assert second.served() == names_of(second, "ab")


def failing_for(path: Path | None, code: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the system that fails for that path; None: for each."""

    def failing(what: object, *arguments: object, **options: object) -> Any:
        if path is None or what == path:
            raise OSError(code, os.strerror(code), str(path))
        return call(what, *arguments, **options)

    return failing


def test_long_journal_is_rewritten_with_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MIN_REWRITE_BYTES", 4096)
    start = ArenaStart(tmp_path)
    client = join_generation(tmp_path, start.owner.arena.generation)
    start.recover()
    (lent,) = start.reserve(3000)
    longest = 0
    for number in range(300):
        assert start.store(number)
        start.look()
        longest = max(longest, (tmp_path / FILE_NAME).stat().st_size)
    assert longest < 60_000, "it grows with what is held, not with what has happened"
    held = start.served()
    assert len(held) == (ARENA_BYTES - lent.metadata.phy_size) // 1024
    start.kill()
    with recovered(tmp_path) as second:
        assert second.served() == held
        assert second.owner.lent_bytes == lent.metadata.phy_size
        client.release()


def test_changes_during_a_rewrite_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MIN_REWRITE_BYTES", 0)
    monkeypatch.setattr(journal, "REWRITE_RATIO", 0)
    start = ArenaStart(tmp_path)
    client = join_generation(tmp_path, start.owner.arena.generation)
    start.store("a")
    lent: list[MemoryObj] = []
    write = JournalFile.write

    def slow_write(file: JournalFile, *entries: Any) -> None:
        is_draft = not file.num_bytes
        write(file, *entries)
        if is_draft:
            lent.extend(start.reserve(2000))
            start.store("b")
            start.hot.remove_many([make_key("a")])

    monkeypatch.setattr(JournalFile, "write", slow_write)
    start.look()
    assert lent
    start.kill()
    with recovered(tmp_path) as second:
        assert second.served() == names_of(second, "b")
        assert second.owner.lent_bytes == 2048
        client.release()


def test_chunks_beyond_the_bound_of_the_journal_are_served_and_not_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_WEIGHT_BYTES", 700)
    start = ArenaStart(tmp_path)
    start.recover()
    for name in "abcd":
        start.store(name)
    assert start.served() == names_of(start, "abcd")
    start.kill()
    with recovered(tmp_path) as second:
        assert second.served() == names_of(second, "ab")
        assert second.owner.lent_bytes == 0


def test_journal_beyond_its_bound_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ArenaStart(tmp_path)
    monkeypatch.setattr(journal, "MAX_JOURNAL_BYTES", 1000)
    for number in range(10):
        assert start.store(number)
    assert not is_recorded(start)
    assert not (tmp_path / FILE_NAME).exists()
    start.kill()
