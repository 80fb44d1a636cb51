"""What a file with a record holds, and whether it is whole. Reads any file, trusts none."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from lmcache_core.errors import RecordError
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import RecordHeader, TensorSpec, decode_head, decoded_bytes, payload_hasher
from lmcache_core.serde.codec import encoding_report
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.layout import RECORD_SUFFIX, record_name
from lmcache_core.storage.disk.record_file import read_head

from lmcache_ctl.codec.layer_errors import LayerErrors, worst_by_layers
from lmcache_ctl.errors import CtlError

BLOCK_BYTES = 1 << 20
BITS = 8


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a record.

    Attributes:
        group: Its group of layers, "" for the only one.
        dtype: Decoded.
        shape: Decoded.
        raw_bytes: Decoded.
        encoded_bytes: In the file.
    """

    group: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    encoded_bytes: int


class StoredKey(msgspec.Struct, frozen=True):
    """Whose KV it is; see `lmcache_core.keys.CacheEngineKey`."""

    fmt: str
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: str
    group: str


class InspectedRecord(msgspec.Struct, frozen=True):
    """What a record's head says, held against the file.

    Attributes:
        key: Whose KV it is.
        url_key: The same as services spell it in URLs.
        is_named_after_key: Whether the file has the name that a tier would look for.
        serde: How it is encoded, `naive` for raw bytes.
        profile: Profile and tables, "" for none.
        lossy: Whether decoding gives other values than were stored.
        tensors: What it holds.
        raw_bytes: Its payload decoded.
        encoded_bytes: Its payload in the file.
        ratio: How many times smaller encoded; None where there is nothing.
        bits_per_element: Bits of the payload for each element; None where there is none.
        errors: What the encoder measured, by group of layers; None where the record does not tell.
        is_digest_right: Whether the payload is the one that was written.
    """

    key: StoredKey
    url_key: str
    is_named_after_key: bool
    serde: str
    profile: str
    lossy: bool
    tensors: list[StoredTensor]
    raw_bytes: int
    encoded_bytes: int
    ratio: float | None
    bits_per_element: float | None
    errors: list[LayerErrors] | None
    is_digest_right: bool


class InspectedFile(msgspec.Struct, frozen=True):
    """A file and what is in it.

    Attributes:
        path: Where it is.
        file_bytes: Its size; None if it cannot be read.
        record: None when it is no record.
        fault: What is wrong with it, "" for nothing.
    """

    path: str
    file_bytes: int | None
    record: InspectedRecord | None
    fault: str


def record_files(paths: Iterable[Path]) -> list[Path]:
    """These files, and the record files below those that are directories.

    Raises:
        CtlError: A path is not there, a directory cannot be read, or there is no record file below
            it.
    """
    found: list[Path] = []
    for path in paths:
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError:
            raise CtlError(f"there is no file {path}") from None
        except OSError as exc:
            raise CtlError(f"cannot read {path}: {exc.strerror}") from exc
        if is_directory:
            below = sorted(_below(path))
            if not below:
                raise CtlError(f"there is no record file (*{RECORD_SUFFIX}) below {path}")
            found += below
        else:
            found.append(path)
    return found


def inspect_file(path: Path) -> InspectedFile:
    """Read a record file, block by block; never raises for what is in it."""
    files, size = DiskFiles(), None
    try:
        with _opened(path) as fd:
            status = os.fstat(fd)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                return InspectedFile(str(path), None, None, "it is not a regular file")
            head = read_head(files, fd)
            header, payload_bytes = decode_head(head)
            digest = _digest(files, fd, len(head), payload_bytes)
        whole = len(head) + payload_bytes
        record = _inspected(header, payload_bytes, path, digest == header.digest)
    except OSError as exc:
        return InspectedFile(str(path), size, None, f"it cannot be read: {exc.strerror or exc}")
    except RecordError as exc:
        return InspectedFile(str(path), size, None, f"it is no whole record: {exc}")
    fault = ""
    if size != whole:
        fault = f"it has {size} bytes where its head says {whole}"
    elif not record.is_digest_right:
        fault = "its payload is not what was written: the digest differs"
    return InspectedFile(str(path), size, record, fault)


def _inspected(
    header: RecordHeader, payload_bytes: int, path: Path, is_digest_right: bool
) -> InspectedRecord:
    key = header.engine_key()
    raw_bytes = decoded_bytes(header)
    elements = sum(math.prod(spec.shape) for spec in header.tensors)
    report = encoding_report(header)
    return InspectedRecord(
        key=StoredKey(
            key.fmt, key.model_name, key.world_size, key.worker_id, key.chunk_hash, key.group
        ),
        url_key=key.to_url(),
        is_named_after_key=path.name == record_name(key),
        serde=header.serde,
        profile=header.profile,
        lossy=header.lossy,
        tensors=[_stored(spec) for spec in header.tensors],
        raw_bytes=raw_bytes,
        encoded_bytes=payload_bytes,
        ratio=raw_bytes / payload_bytes if payload_bytes else None,
        bits_per_element=BITS * payload_bytes / elements if elements else None,
        errors=None if report is None else worst_by_layers(report.groups),
        is_digest_right=is_digest_right,
    )


def _stored(spec: TensorSpec) -> StoredTensor:
    return StoredTensor(
        spec.group, spec.dtype, spec.shape, num_bytes(spec.shape, spec.dtype), spec.length
    )


def _digest(files: DiskFiles, fd: int, at: int, payload_bytes: int) -> bytes:
    """Digest of the payload as far as it is there."""
    hasher, block = payload_hasher(), memoryview(bytearray(BLOCK_BYTES))
    end = at + payload_bytes
    while at < end:
        num_read = files.read(fd, block[: min(BLOCK_BYTES, end - at)], at)
        if num_read == 0:
            break
        hasher.update(block[:num_read])
        at += num_read
    return hasher.digest()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor for reading; opening a pipe or a device does not wait."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _below(directory: Path) -> Iterator[Path]:
    def refuse(exc: OSError) -> None:
        raise CtlError(f"cannot read the directory {exc.filename}: {exc.strerror}") from exc

    for parent, _, names in os.walk(directory, onerror=refuse):
        yield from (Path(parent, name) for name in names if name.endswith(RECORD_SUFFIX))
