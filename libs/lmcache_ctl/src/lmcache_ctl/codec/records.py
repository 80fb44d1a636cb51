"""Inspect record files: what each holds, and whether it is whole. Reads any file, trusts none."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from lmcache_core.errors import RecordError
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import RecordHeader, decode_head, decoded_bytes, payload_hasher
from lmcache_core.serde.codec import GroupError, encoding_report
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.layout import RECORD_SUFFIX, record_name
from lmcache_core.storage.disk.record_file import read_head

from lmcache_ctl.errors import CtlError
from lmcache_ctl.output import UNKNOWN, error_text, print_text, ratio_text, size_text

BLOCK_BYTES = 1 << 20
BITS = 8


class LayerErrors(msgspec.Struct, frozen=True):
    """How far decoded values of a group of layers are from what was stored, as encoders measured.

    Attributes:
        layers: The group, for example `keys 0-9`.
        max_relative: Largest error, relative to the largest value of its token or channel.
        rms_relative: Root of the mean square error, relative to the root of the mean square value,
            each in parts of its scale: the largest value of its token or channel.
    """

    layers: str
    max_relative: float
    rms_relative: float


def worst_by_layers(groups: Iterable[GroupError]) -> list[LayerErrors]:
    """Return the largest errors of each group, of all reports that `groups` come from."""
    worst: dict[str, LayerErrors] = {}
    for group in groups:
        seen = worst.get(group.name, LayerErrors(group.name, 0.0, 0.0))
        largest = max(seen.max_relative, group.max_relative)
        rms = max(seen.rms_relative, group.rms_relative)
        worst[group.name] = LayerErrors(group.name, largest, rms)
    return list(worst.values())


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
        record: None if the file is not a record.
        fault: What is wrong with it, "" for nothing.
    """

    path: str
    file_bytes: int | None
    record: InspectedRecord | None
    fault: str


def record_files(paths: Iterable[Path]) -> list[Path]:
    """Return these files, and the record files below those that are directories.

    Raises:
        CtlError: A path does not exist, a directory cannot be read, or holds no record file.
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
    """Read a record file, block by block; never raise because of its content."""
    size = None
    try:
        # opening a pipe or a device does not wait
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                return InspectedFile(str(path), None, None, "it is not a regular file")
            files = DiskFiles()
            head = read_head(files, fd)
            header, payload_bytes = decode_head(head)
            digest = _digest(files, fd, len(head), payload_bytes)
        finally:
            os.close(fd)
        record = _inspected(header, payload_bytes, path, digest == header.digest)
    except OSError as exc:
        return InspectedFile(str(path), size, None, f"it cannot be read: {exc.strerror or exc}")
    except RecordError as exc:
        return InspectedFile(str(path), size, None, f"it is not a whole record: {exc}")
    fault, whole = "", len(head) + payload_bytes
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
        key=msgspec.convert(key, StoredKey, from_attributes=True),
        url_key=key.to_url(),
        is_named_after_key=path.name == record_name(key),
        serde=header.serde,
        profile=header.profile,
        lossy=header.lossy,
        tensors=[
            StoredTensor(
                spec.group, spec.dtype, spec.shape, num_bytes(spec.shape, spec.dtype), spec.length
            )
            for spec in header.tensors
        ],
        raw_bytes=raw_bytes,
        encoded_bytes=payload_bytes,
        ratio=raw_bytes / payload_bytes if payload_bytes else None,
        bits_per_element=BITS * payload_bytes / elements if elements else None,
        errors=None if report is None else worst_by_layers(report.groups),
        is_digest_right=is_digest_right,
    )


def _digest(files: DiskFiles, fd: int, at: int, payload_bytes: int) -> bytes:
    """Return the digest of the payload, or of the part that is in the file."""
    hasher, block = payload_hasher(), memoryview(bytearray(BLOCK_BYTES))
    end = at + payload_bytes
    while at < end:
        num_read = files.read(fd, block[: min(BLOCK_BYTES, end - at)], at)
        if num_read == 0:
            break
        hasher.update(block[:num_read])
        at += num_read
    return hasher.digest()


def _below(directory: Path) -> Iterator[Path]:
    def refuse(exc: OSError) -> None:
        raise CtlError(f"cannot read the directory {exc.filename}: {exc.strerror}") from exc

    for parent, _, names in os.walk(directory, onerror=refuse):
        yield from (Path(parent, name) for name in names if name.endswith(RECORD_SUFFIX))


def print_files(files: Sequence[InspectedFile]) -> None:
    """Print a paragraph for each file, then what they are together."""
    for file in files:
        print_text(file.path)
        lines = [] if file.record is None else list(_record_lines(file.record))
        for name, value in lines + ([("FAULT", file.fault)] if file.fault else []):
            print_text(f"  {name:<10} {value}")
    records = [file.record for file in files if file.record is not None]
    raw = sum(record.raw_bytes for record in records)
    encoded = sum(record.encoded_bytes for record in records)
    ratio = ratio_text(raw / encoded if encoded else None)
    faults = sum(bool(file.fault) for file in files)
    print_text(
        f"{len(files)} files, {faults} with a fault; {size_text(raw)} raw, {size_text(encoded)}"
        f" encoded, {ratio}"
    )


def _record_lines(record: InspectedRecord) -> Iterator[tuple[str, str]]:
    key = record.key
    group = f", group {key.group}" if key.group else ""
    lossy = "lossy" if record.lossy else "lossless"
    profile = f", profile {record.profile}" if record.profile else ""
    yield "chunk", key.chunk_hash
    worker = f"worker {key.worker_id} of {key.world_size}"
    yield "of", f"{key.model_name} ({key.fmt}), {worker}{group}"
    yield "serde", f"{record.serde}, {lossy}{profile}"
    for tensor in record.tensors:
        group = f"{tensor.group}: " if tensor.group else ""
        sizes = f"{size_text(tensor.raw_bytes)} in {size_text(tensor.encoded_bytes)}"
        yield "tensor", f"{group}{tensor.dtype} {list(tensor.shape)}, {sizes}"
    bits = UNKNOWN if record.bits_per_element is None else f"{record.bits_per_element:.3f}"
    size = size_text(record.encoded_bytes)
    yield "size", f"{size}, {ratio_text(record.ratio)}, {bits} bits an element"
    if record.errors:
        errors = (
            f"{one.layers}: max {error_text(one.max_relative)}, rms {error_text(one.rms_relative)}"
            for one in record.errors
        )
        yield "errors", "; ".join(errors)
    elif record.lossy:
        yield "errors", "the record does not tell them"
    yield "digest", "right" if record.is_digest_right else "WRONG"
    if not record.is_named_after_key:
        yield "note", "the file is not named after its key: no tier would find it here"
