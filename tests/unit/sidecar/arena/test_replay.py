"""What is believed of a journal, and what is not."""

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


def test_a_journal_is_followed_to_its_end() -> None:
    found = believed(written(HISTORY))
    assert found.lent == {12: [(2048, 512), (0, 512)]}
    assert found.committed == (committed(1024), committed(4096))


def test_chunks_come_in_the_order_in_which_they_were_kept() -> None:
    found = replay(
        [BEGIN, Reserved(1, ((0, 1024), (1024, 1024))), committed(1024), committed(0)], SIZE, INODE
    )
    assert [entry.offset for entry in found.committed] == [1024, 0]


def test_a_torn_tail_is_left_out_at_every_byte() -> None:
    """It was being written when its writer was killed: nobody has been told of what it says."""
    data = written(HISTORY)
    ends = [len(written(HISTORY[: i + 1])) for i in range(len(HISTORY))]
    for length in range(len(data)):
        num_whole = sum(end <= length for end in ends)
        if num_whole == 0:
            with pytest.raises(JournalError):
                believed(data[:length])
        else:
            assert believed(data[:length]) == replay(HISTORY[:num_whole], SIZE, INODE)


def test_no_flipped_bit_is_believed() -> None:
    """An entry that is lost in the middle could be one that says what clients may still write
    to.
    """
    data = written(HISTORY)
    for at in range(len(data)):
        for bit in (1, 16, 128):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(JournalError):
                believed(bytes(damaged))


@pytest.mark.parametrize("at", range(1, len(HISTORY)))
def test_no_entry_can_be_left_out_or_doubled(at: int) -> None:
    pieces = [framed(encode_entry(entry), place) for place, entry in enumerate(HISTORY)]
    with pytest.raises(JournalError):
        believed(b"".join([*pieces[:at], pieces[at], *pieces[at:]]))
    if at < len(HISTORY) - 1:
        with pytest.raises(JournalError):
            believed(b"".join([*pieces[:at], *pieces[at + 1 :]]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_garbage_is_not_believed(garbage: bytes, at: int) -> None:
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
        [Reserved(1, ((0, 512),))],
        [Begin(VERSION + 1, SIZE, INODE)],
        [Begin(VERSION, SIZE * 2, INODE)],
        [Begin(VERSION, SIZE, INODE + 1)],
        [BEGIN, BEGIN],
        [BEGIN, Reserved(1, ((0, 512),)), Reserved(1, ((0, 512),))],
        [BEGIN, Reserved(1, ((0, 512), (0, 512)))],
        [BEGIN, Reserved(1, ((0, 1024),)), Reserved(2, ((512, 512),))],
        [BEGIN, committed(0), Reserved(2, ((512, 512),))],
        [BEGIN, committed(0), committed(0)],
        [BEGIN, committed(0), Reserved(1, ((0, 1024),))],
        [BEGIN, Reserved(1, ((0, 512),)), committed(0, 1000)],
        [BEGIN, Freed((0,))],
        [BEGIN, committed(0), Freed((0, 0))],
        [BEGIN, Reserved(1, ((100, 512),))],
        [BEGIN, Reserved(1, ((0, 500),))],
        [BEGIN, Reserved(1, ((0, 0),))],
        [BEGIN, Reserved(1, ((0, -512),))],
        [BEGIN, Reserved(1, ((-512, 512),))],
        [BEGIN, Reserved(1, ((SIZE, 512),))],
        [BEGIN, Reserved(1, ((SIZE - 512, 1024),))],
        [BEGIN, committed(0, SIZE + 1)],
        [BEGIN, committed(0, -1)],
    ],
)
def test_what_cannot_be_is_not_believed(entries: list[AnyEntry]) -> None:
    with pytest.raises(JournalError):
        believed(written(entries))


@pytest.mark.parametrize(
    "body", [b"\x93\xa5Other\x01\x02", b"\xc1", b"\x92\xa5Freed\x01", b"\xff" * 40]
)
def test_an_entry_of_another_kind_is_not_believed(body: bytes) -> None:
    with pytest.raises(JournalError):
        believed(framed(encode_entry(BEGIN), 0) + framed(body, 1))


def test_an_entry_has_a_bound() -> None:
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
def test_a_file_that_somebody_else_may_have_written_is_not_read(tmp_path: Path, kind: str) -> None:
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
