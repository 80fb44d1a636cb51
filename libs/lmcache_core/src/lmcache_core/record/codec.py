"""Encoding of a record: prefix, header, checksum, payload.

Source: `docs/protocols.md`, "Record". Golden vectors: `tests/contract/golden/records.json`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import xxhash

from lmcache_core.errors import RecordError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record.header import (
    INLINE_DIGEST_BYTES,
    RAW_SERDE,
    REPORT_EXTENSION,
    UNSEALED_DIGEST,
    RecordHeader,
    RecordReason,
    TensorSpec,
    payload_digest,
)

MAGIC = b"LMKV"
VERSION = 1
PREFIX_BYTES = 24
CHECKSUM_BYTES = 16
HEAD_ALIGN_BYTES = 512
MAX_HEAD_BYTES = 64 << 10
MAX_PAYLOAD_BYTES = 4 << 30

_PREFIX = struct.Struct("<4sHHIIQ")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RecordHeader)


@dataclass(frozen=True, slots=True)
class RecordPrefix:
    """The fixed first bytes of a record, which state the lengths of the rest.

    Attributes:
        head_bytes: Length of prefix, header, padding and checksum; the offset of the payload.
        header_bytes: Length of the header alone.
    """

    head_bytes: int
    header_bytes: int
    payload_bytes: int


def encode_head(header: RecordHeader, payload_bytes: int) -> bytes:
    """Return everything of a record except its payload; its length is a multiple of
    `HEAD_ALIGN_BYTES`.

    Raises:
        RecordError: The header exceeds its bounds or does not match the payload.
    """
    header.check(payload_bytes)
    encoded = _ENCODER.encode(header)
    needed = PREFIX_BYTES + len(encoded) + CHECKSUM_BYTES
    units = _head_units(len(encoded))
    if units * HEAD_ALIGN_BYTES > MAX_HEAD_BYTES or not 0 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        raise RecordError(
            RecordReason.BOUNDS, f"head of {needed} bytes, payload of {payload_bytes} bytes"
        )
    prefix = _PREFIX.pack(MAGIC, VERSION, units, len(encoded), 0, payload_bytes)
    padding = bytes(units * HEAD_ALIGN_BYTES - needed)
    covered = b"".join((prefix, encoded, padding))
    return covered + xxhash.xxh3_128_digest(covered)


def head_bytes(header: RecordHeader) -> int:
    """Return the length of `encode_head`; the digest does not affect it."""
    return _head_units(len(_ENCODER.encode(header))) * HEAD_ALIGN_BYTES


def decode_prefix(data: bytes | bytearray | memoryview) -> RecordPrefix:
    """Parse the first `PREFIX_BYTES` of a record, which state the lengths of its head and payload.

    Raises:
        RecordError: Too short, not a record, another version, or lengths out of bounds.
    """
    if len(data) < PREFIX_BYTES:
        raise RecordError(
            RecordReason.SHORT, f"{len(data)} bytes, a record begins with {PREFIX_BYTES}"
        )
    magic, version, units, header_bytes, reserved, payload_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RecordError(RecordReason.MAGIC, magic.hex())
    if version != VERSION:
        raise RecordError(RecordReason.VERSION, str(version))
    head_bytes = units * HEAD_ALIGN_BYTES
    spare = head_bytes - PREFIX_BYTES - header_bytes - CHECKSUM_BYTES
    if (
        reserved
        or head_bytes > MAX_HEAD_BYTES
        or not 0 <= spare < HEAD_ALIGN_BYTES
        or payload_bytes > MAX_PAYLOAD_BYTES
    ):
        raise RecordError(
            RecordReason.BOUNDS,
            f"head {head_bytes}, header {header_bytes}, payload {payload_bytes} bytes",
        )
    return RecordPrefix(head_bytes, header_bytes, payload_bytes)


def decode_head(
    head: bytes | bytearray | memoryview, expected: CacheEngineKey | None = None
) -> tuple[RecordHeader, int]:
    """Parse and check the head of a record.

    Args:
        head: Exactly the head: `RecordPrefix.head_bytes` bytes.
        expected: The key requested; another one is refused.

    Returns:
        The header and the payload's length.

    Raises:
        RecordError: The head is invalid.
    """
    prefix = decode_prefix(head)
    if len(head) != prefix.head_bytes:
        raise RecordError(RecordReason.SHORT, f"{len(head)} bytes of a head of {prefix.head_bytes}")
    view = memoryview(head)
    covered = view[: prefix.head_bytes - CHECKSUM_BYTES]
    checksum, named = (
        xxhash.xxh3_128_digest(covered),
        bytes(view[prefix.head_bytes - CHECKSUM_BYTES :]),
    )
    if checksum != named:
        raise RecordError(RecordReason.HEAD_CHECKSUM, f"{checksum.hex()} instead of {named.hex()}")
    header_end = PREFIX_BYTES + prefix.header_bytes
    if any(covered[header_end:]):
        raise RecordError(RecordReason.BOUNDS, "padding is not zero")
    try:
        header = _DECODER.decode(view[PREFIX_BYTES:header_end])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RecordError(RecordReason.HEADER, str(exc)) from exc
    header.check(prefix.payload_bytes)
    if expected is not None and header.key != expected.canonical():
        raise RecordError(RecordReason.WRONG_KEY)
    return header, prefix.payload_bytes


def verify_payload(header: RecordHeader, payload: bytes | bytearray | memoryview) -> None:
    """Compare a payload with the digest in its header.

    Raises:
        RecordError: They differ.
    """
    check_digest(header, payload_digest(payload))


async def has_its_digest(header: RecordHeader, payload: bytes | bytearray | memoryview) -> bool:
    """Return whether a payload has the digest in its header.

    Large payloads are digested in a thread. If this is cancelled, the thread may still read memory
    that has been released since; it writes nothing, and its result is dropped.
    """
    if len(payload) <= INLINE_DIGEST_BYTES:
        return payload_digest(payload) == header.digest
    return await asyncio.to_thread(payload_digest, payload) == header.digest


def check_digest(header: RecordHeader, digest: bytes) -> None:
    """Compare the digest of a payload with the one in its header.

    Raises:
        RecordError: They differ.
    """
    if digest != header.digest:
        raise RecordError(RecordReason.DIGEST, digest.hex())


def _head_units(header_bytes: int) -> int:
    return -(-(PREFIX_BYTES + header_bytes + CHECKSUM_BYTES) // HEAD_ALIGN_BYTES)


def decoded_bytes(header: RecordHeader) -> int:
    """Return the size of the decoded payload: its tensors, one after the other.

    Raises:
        RecordError: It exceeds the limit of a payload.
    """
    size = sum(num_bytes(spec.shape, spec.dtype) for spec in header.tensors)
    if size > MAX_PAYLOAD_BYTES:
        raise RecordError(
            RecordReason.BOUNDS,
            f"{size} bytes when decoded; a payload has at most {MAX_PAYLOAD_BYTES}",
        )
    return size


def decoded_header(header: RecordHeader) -> RecordHeader:
    """Return the header of the decoded payload, its digest yet to be computed.

    Key, profile and the lossy mark are kept, so that decoded values are never taken for the
    original ones. The encoder's measurements concern the encoded payload, and are dropped.
    """
    extensions = tuple(
        extension for extension in header.extensions if extension.id != REPORT_EXTENSION
    )
    tensors = tuple(_packed(header.tensors))
    return RecordHeader(
        header.key, RAW_SERDE, header.profile, header.lossy, tensors, UNSEALED_DIGEST, extensions
    )


def _packed(tensors: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    at = 0
    for spec in tensors:
        length = num_bytes(spec.shape, spec.dtype)
        yield TensorSpec(spec.group, spec.dtype, spec.shape, at, length)
        at += length
