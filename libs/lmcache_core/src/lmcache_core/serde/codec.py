"""The interface of a codec: the payload of a chunk, encoded for another place, and back. No torch.

A codec works on the bytes of a chunk's payload, so that the sidecar, which has no tensors, can
encode what its engines store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from lmcache_core.record import REPORT_EXTENSION, Extension, RecordHeader, TensorSpec

CACHEGEN_SERDE = "cachegen"
LOSSLESS_SERDE = "lossless"
TABLES_MARK = "@"
"""Separates the name of a profile from the id of its tables."""
MAX_REPORT_BYTES = 16 << 10


class GroupError(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far decoded values of a group of layers are from what was encoded.

    Attributes:
        name: The group, for example `keys 0-9`.
        max_relative: Largest error, relative to the largest value of its scale (a token or a
            channel of one layer).
        rms_relative: Root of the mean square error, relative to the root of the mean square value.
    """

    name: str
    max_relative: float
    rms_relative: float


class EncodingReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an encoder measured of its own work; travels in the record.

    Attributes:
        bits_per_element: Bits of the encoded payload for each element, everything counted but the
            record's head.
        raw_bytes: Bytes of the payload before.
        encoded_bytes: Bytes of the payload after.
        groups: Errors by group of layers; empty when nothing is lost.
    """

    bits_per_element: float
    raw_bytes: int
    encoded_bytes: int
    groups: tuple[GroupError, ...] = ()


def encoding_of(header: RecordHeader) -> str:
    """Return a record's serde and the id of the tables that decode it, as one name."""
    return f"{header.serde}{TABLES_MARK}{header.profile.rpartition(TABLES_MARK)[2]}"


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EncodingReport)


def report_extension(report: EncodingReport) -> Extension | None:
    """Return the extension that carries a report; None for one that is longer than
    `MAX_REPORT_BYTES`, since a record must not grow by it.
    """
    data = _ENCODER.encode(report)
    return Extension(REPORT_EXTENSION, False, data) if len(data) <= MAX_REPORT_BYTES else None


def encoding_report(header: RecordHeader) -> EncodingReport | None:
    """Return the report that a record carries, if it can be read here, else None: it is for
    people, and never decides anything.
    """
    for extension in header.extensions:
        if extension.id == REPORT_EXTENSION and len(extension.data) <= MAX_REPORT_BYTES:
            try:
                return _DECODER.decode(extension.data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
    return None


class EncodedPayload(msgspec.Struct, frozen=True):
    """An encoded payload and what its record has to say about it.

    Attributes:
        payload: Its bytes, which nothing else writes.
        tensors: The tensors of the chunk: dtype and shape as decoded, offset and length as encoded.
        serde: For `RecordHeader.serde`.
        profile: For `RecordHeader.profile`: the profile and, after `@`, the id of its tables.
        lossy: Whether decoding gives other values.
    """

    payload: memoryview
    tensors: tuple[TensorSpec, ...]
    serde: str
    profile: str
    lossy: bool
    report: EncodingReport


class ChunkCodec(Protocol):
    """Encodes and decodes payloads. Thread-safe; `open` first."""

    @property
    def serde(self) -> str:
        """Name of the serde, as `remote_serde` and records say it."""

    @property
    def lossy(self) -> bool:
        """Whether what it encodes may lose something."""

    def open(self) -> None:
        """Make everything ready that must not be made on a request: compiled code, tables, threads.
        May take a minute.

        Raises:
            ConfigError: A package that it needs is not installed, or a table file cannot be read.
        """

    def close(self) -> None:
        """Let its threads end, without waiting for them. Idempotent."""

    def encode(self, tensors: Sequence[TensorSpec], payload: memoryview) -> EncodedPayload | None:
        """Encode a raw payload. Blocks, uses the codec's threads, holds the GIL only between them.

        Args:
            tensors: What the payload holds, raw (`serde` "naive").
            payload: Its bytes; only read.

        Returns:
            None when encoding would not make it smaller: keep it raw.
        """

    def decodes(self, header: RecordHeader) -> bool:
        """Return whether this codec can decode such a record: its serde, profile and tables are
        known here.
        """

    def decode(self, header: RecordHeader, payload: memoryview, out: memoryview) -> None:
        """Decode a payload that has the digest of its header.

        Args:
            header: Of its record; `decodes` is true.
            out: Where the raw payload goes: exactly `decoded_bytes(header)` bytes, tensors one
                after the other in the header's order.

        Raises:
            SerdeError: The bytes are not what the header says. Bounded time and memory; `out` may
                be partly written.
        """
