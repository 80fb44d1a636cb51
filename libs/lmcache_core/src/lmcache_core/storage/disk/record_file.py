"""The record in a file: written in one go, under another name first; read head first, its payload
straight into memory and digested on the way. Blocking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.errors import RecordError
from lmcache_core.record import (
    Chunk,
    RecordHeader,
    RecordReason,
    check_digest,
    decode_prefix,
    payload_hasher,
)
from lmcache_core.storage.disk.files import DiskFiles

FIRST_READ_BYTES = 4096
"""Holds nearly every head, and is what a file system reads at least."""
BLOCK_BYTES = 1 << 20
"""A payload is digested block by block, while each is still in the processor's cache: with several
threads reading, 1.25 times as fast as digesting it as a whole afterwards (32 MiB records from the
page cache, two cores of an AMD EPYC with 1 MiB of L2 each; 0.5 to 4 MiB are alike).
"""


@contextmanager
def opened(files: DiskFiles, path: Path) -> Iterator[int]:
    """Open a file for reading, and close it at the end."""
    fd = files.open(path)
    try:
        yield fd
    finally:
        files.close(fd)


def read_head(files: DiskFiles, fd: int, first_bytes: int = FIRST_READ_BYTES) -> bytes:
    """Return the bytes of a record's head, as many as its prefix names or as there are; not checked
    yet.

    Args:
        files: How the file is touched.
        fd: The file.
        first_bytes: Read at once; if the head is longer, the file is read again.

    Raises:
        RecordError: Its first bytes are no prefix.
        OSError: It cannot be read.
    """
    first = bytearray(first_bytes)
    num_read = files.read(fd, first, 0)
    prefix = decode_prefix(memoryview(first)[:num_read])
    if prefix.head_bytes > num_read:
        first = bytearray(prefix.head_bytes)
        num_read = files.read(fd, first, 0)
    return bytes(memoryview(first)[: min(num_read, prefix.head_bytes)])


def read_payload(
    files: DiskFiles, fd: int, at: int, header: RecordHeader, payload: memoryview
) -> None:
    """Fill `payload` with the payload of a record, and verify it.

    Args:
        files: How the file is touched.
        fd: The file.
        at: Where the payload begins.
        header: Names its digest.
        payload: Of exactly its length.

    Raises:
        RecordError: The file does not end with it, or the digest is another one.
        OSError: It cannot be read.
    """
    _read_blocks(
        files,
        fd,
        at,
        header,
        (payload[begin : begin + BLOCK_BYTES] for begin in range(0, len(payload), BLOCK_BYTES)),
    )


def check_payload(
    files: DiskFiles, fd: int, at: int, header: RecordHeader, payload_bytes: int
) -> None:
    """Verify a payload of that length as `read_payload` does, in memory of its own.

    Raises:
        RecordError: As `read_payload` raises it.
        OSError: It cannot be read.
    """
    block = memoryview(bytearray(min(BLOCK_BYTES, payload_bytes)))
    _read_blocks(
        files,
        fd,
        at,
        header,
        (block[: payload_bytes - begin] for begin in range(0, payload_bytes, BLOCK_BYTES)),
    )


def _read_blocks(
    files: DiskFiles, fd: int, at: int, header: RecordHeader, blocks: Iterable[memoryview]
) -> None:
    hasher = payload_hasher()
    for block in blocks:
        if files.read(fd, block, at) != len(block):
            raise RecordError(RecordReason.SHORT, "the file ends within its record")
        hasher.update(block)
        at += len(block)
    if files.read(fd, bytearray(1), at):
        raise RecordError(RecordReason.SHORT, "the file goes on behind its record")
    check_digest(header, hasher.digest())


def write_record(files: DiskFiles, path: Path, chunk: Chunk, fsync: bool) -> None:
    """Write a record to a file that must not exist yet, without copying it.

    Args:
        files: How the file is touched.
        path: A temporary name; its directory is made when missing.
        chunk: What to write; its digest is computed if it was not.
        fsync: Wait for the device.

    Raises:
        OSError: It cannot be written; what is there is incomplete.
    """
    head = chunk.head
    try:
        fd = files.create(path)
    except FileNotFoundError:
        files.make_directory(path.parent)
        fd = files.create(path)
    try:
        files.write(fd, [head, chunk.memory.byte_array])
        if fsync:
            files.sync(fd)
    finally:
        files.close(fd)


def name_record(files: DiskFiles, source: Path, target: Path, root: Path, fsync: bool) -> None:
    """Give a written record its name, over whatever had it.

    Args:
        files: How the files are touched.
        source: Its temporary name.
        target: `root/tenant/shard/name`; directories are made when missing.
        root: Where the tier begins.
        fsync: Wait until new directories are on the device.

    Raises:
        OSError: It has kept its temporary name.
    """
    try:
        files.rename(source, target)
    except FileNotFoundError:
        files.make_directory(target.parent)
        if fsync:
            for directory in (target.parent.parent, root):
                files.sync_directory(directory)
        files.rename(source, target)
