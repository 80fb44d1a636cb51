"""Journals are replayed whole, to a torn end, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.errors import RecordError
from lmcache_sidecar.arena.entries import (
    MAX_ENTRY_BYTES,
    VERSION,
    AnyEntry,
    Begin,
    Committed,
    FoundExtents,
    Freed,
    JournalError,
    Reserved,
    encode_entry,
    framed,
    read_entries,
    replay,
    with_padding,
    without_padding,
)
from lmcache_sidecar.arena.journal import FILE_NAME, MAX_JOURNAL_BYTES, read_journal

from tests.suites.chunks import make_chunk

SIZE, INODE = 64 << 10, 7
BEGIN = Begin(VERSION, SIZE, INODE)
HEAD = without_padding(make_chunk("a").head)


def committed(offset: int, length: int = 1000) -> Committed:
    return Committed(offset, length, "default", 12.5, HEAD)


HISTORY: list[AnyEntry] = [
    BEGIN,
    Reserved(11, ((0, 1024), (1024, 1024))),
    committed(1024),
    Reserved(12, ((2048, 512),)),
    committed(4096),
    Freed((0,)),
    Reserved(12, ((0, 512),)),
]


def written(entries: list[AnyEntry]) -> bytes:
    return b"".join(framed(encode_entry(entry), place) for place, entry in enumerate(entries))


def believed(data: bytes) -> FoundExtents:
    return replay(read_entries(data), SIZE, INODE)


def test_journal_is_replayed() -> None:
    found = believed(written(HISTORY))
    assert found.lent == {12: [(2048, 512), (0, 512)]}
    assert found.committed == (committed(1024), committed(4096))


def test_torn_tail_is_ignored_at_every_byte() -> None:
    """It was being written when its writer was killed: no client had an answer yet."""
    data = written(HISTORY)
    ends = [len(written(HISTORY[: i + 1])) for i in range(len(HISTORY))]
    for length in range(len(data)):
        num_whole = sum(end <= length for end in ends)
        if num_whole == 0:
            with pytest.raises(JournalError):
                believed(data[:length])
        else:
            assert believed(data[:length]) == replay(HISTORY[:num_whole], SIZE, INODE)


def test_flipped_bit_is_refused() -> None:
    """An entry lost in the middle may name memory that clients still write to."""
    data = written(HISTORY)
    for at in range(len(data)):
        for bit in (1, 16, 128):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(JournalError):
                believed(bytes(damaged))


@pytest.mark.parametrize("at", range(1, len(HISTORY)))
def test_missing_or_repeated_entry_is_refused(at: int) -> None:
    pieces = [framed(encode_entry(entry), place) for place, entry in enumerate(HISTORY)]
    with pytest.raises(JournalError):
        believed(b"".join([*pieces[:at], pieces[at], *pieces[at:]]))
    if at < len(HISTORY) - 1:
        with pytest.raises(JournalError):
            believed(b"".join([*pieces[:at], *pieces[at + 1 :]]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_garbage_is_refused(garbage: bytes, at: int) -> None:
    data = written(HISTORY)
    with pytest.raises(JournalError):
        believed(garbage)
    if len(garbage) >= 16:
        with pytest.raises(JournalError):
            believed(data + garbage)
        with pytest.raises(JournalError):
            believed(data[:at] + garbage + data[at:])


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [Begin(VERSION + 1, SIZE, INODE)],
        [Begin(VERSION, SIZE * 2, INODE)],
        [Begin(VERSION, SIZE, INODE + 1)],
        [BEGIN, BEGIN],
        [BEGIN, Reserved(1, ((0, 1024),)), Reserved(2, ((512, 512),))],
        [BEGIN, committed(0), Reserved(1, ((0, 1024),))],
        [BEGIN, Reserved(1, ((0, 512),)), committed(0, 1000)],
        [BEGIN, Freed((0,))],
        [BEGIN, committed(0), Freed((0, 0))],
        [BEGIN, Reserved(1, ((100, 512),))],
        [BEGIN, Reserved(1, ((0, -512),))],
        [BEGIN, Reserved(1, ((SIZE - 512, 1024),))],
        [BEGIN, committed(0, SIZE + 1)],
    ],
)
def test_impossible_history_is_refused(entries: list[AnyEntry]) -> None:
    with pytest.raises(JournalError):
        believed(written(entries))


@pytest.mark.parametrize("body", [b"\x93\xa5Other\x01\x02", b"\x92\xa5Freed\x01"])
def test_entry_of_another_kind_is_refused(body: bytes) -> None:
    with pytest.raises(JournalError):
        believed(framed(encode_entry(BEGIN), 0) + framed(body, 1))


def test_length_of_an_entry_is_bounded() -> None:
    with pytest.raises(JournalError, match="no length"):
        believed(framed(encode_entry(BEGIN), 0) + framed(bytes(MAX_ENTRY_BYTES + 1), 1))


@pytest.mark.parametrize("name", ["a", "b" * 400])
def test_heads_come_back_whole_without_their_padding(name: str) -> None:
    head = make_chunk(name).head
    short = without_padding(head)
    assert len(short) < len(head)
    assert with_padding(short) == head
    for damaged in (short[:-1], short + b"\0", b"", b"x" * 30):
        with pytest.raises(RecordError):
            with_padding(damaged)


@pytest.mark.parametrize("kind", ["absent", "link", "directory", "writable by others", "too long"])
def test_file_that_another_user_may_have_written_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / FILE_NAME
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(written(HISTORY))
        path.symlink_to("elsewhere")
    elif kind == "directory":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(written(HISTORY))
        path.chmod(0o666 if kind == "writable by others" else 0o600)
    if kind == "too long":
        with path.open("r+b") as file:
            file.truncate(2 * MAX_JOURNAL_BYTES + 1)
    with pytest.raises(JournalError):
        list(read_journal(tmp_path))
