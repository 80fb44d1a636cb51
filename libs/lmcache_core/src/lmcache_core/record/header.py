"""The header of a record, which describes its payload.

Source: `docs/protocols.md`, "Record". Golden vectors: `tests/contract/golden/records.json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import xxhash

from lmcache_core.errors import IdentityError, RecordError
from lmcache_core.keys import MAX_CANONICAL_KEY_BYTES, CacheEngineKey
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name, num_bytes

DIGEST_BYTES = 16
UNSEALED_DIGEST = bytes(DIGEST_BYTES)
"""Placeholder in a header whose digest is yet to be computed."""
INLINE_DIGEST_BYTES = 1 << 20
"""Largest payload that an event loop digests itself, rather than in a thread."""


def payload_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """Return xxh3-128 of the payload. Releases the GIL while it reads."""
    return xxhash.xxh3_128_digest(payload)


def payload_hasher() -> xxhash.xxh3_128:
    """Return a hasher that computes the same digest incrementally: pass the pieces to `update`, in
    order, then call `digest()`.
    """
    return xxhash.xxh3_128()


RAW_SERDE = "naive"
REPORT_EXTENSION = 1
"""Id of the extension with an encoder's measurements of its own work; ignorable."""
MAX_TENSORS = 256
MAX_DIMENSIONS = 8
MAX_EXTENSIONS = 64
MAX_NAME_CHARS = 128
MAX_DIMENSION = 1 << 40


class RecordReason(StrEnum):
    """Why bytes are refused as a record."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    BOUNDS = "bounds"
    HEADER = "header"
    HEAD_CHECKSUM = "head_checksum"
    DIGEST = "digest"
    WRONG_KEY = "wrong_key"
    EXTENSION = "extension"


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a chunk.

    Attributes:
        group: Layer group, "" for the only one.
        dtype: Name of the dtype of the decoded tensor.
        shape: Shape of the decoded tensor.
        offset: Offset of its encoded bytes in the payload.
        length: Length of its encoded bytes.
    """

    group: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class Extension(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A field of a later version.

    Attributes:
        must_understand: A reader that does not know it refuses the record.
    """

    id: int
    must_understand: bool
    data: bytes


class RecordHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a record.

    Attributes:
        key: Canonical bytes of the `CacheEngineKey`.
        serde: Encoding of the payload, "naive" for raw bytes.
        profile: Profile of the encoding, "" for none.
        lossy: Whether decoded values differ from those stored.
        digest: xxh3-128 of the payload.
    """

    key: bytes
    serde: str
    profile: str
    lossy: bool
    tensors: tuple[TensorSpec, ...]
    digest: bytes
    extensions: tuple[Extension, ...] = ()

    def engine_key(self) -> CacheEngineKey:
        """Return the parsed key."""
        return CacheEngineKey.from_canonical(self.key)

    def check(self, payload_bytes: int) -> None:
        """Check every field against its bounds and against the payload's length.

        Raises:
            RecordError: A field is out of bounds or inconsistent.
        """
        if not 0 < len(self.key) <= MAX_CANONICAL_KEY_BYTES:
            raise RecordError(RecordReason.BOUNDS, f"key of {len(self.key)} bytes")
        try:
            CacheEngineKey.from_canonical(self.key)
        except IdentityError as exc:
            raise RecordError(RecordReason.HEADER, str(exc)) from exc
        if not 0 < len(self.serde) <= MAX_NAME_CHARS or len(self.profile) > MAX_NAME_CHARS:
            raise RecordError(RecordReason.BOUNDS, "name of serde or profile")
        if len(self.digest) != DIGEST_BYTES:
            raise RecordError(RecordReason.BOUNDS, f"digest of {len(self.digest)} bytes")
        if len(self.tensors) > MAX_TENSORS or len(self.extensions) > MAX_EXTENSIONS:
            raise RecordError(
                RecordReason.BOUNDS,
                f"{len(self.tensors)} tensors, {len(self.extensions)} extensions",
            )
        for extension in self.extensions:
            if extension.must_understand:
                raise RecordError(
                    RecordReason.EXTENSION,
                    f"extension {extension.id} must be understood and is unknown",
                )
        self._check_tensors(payload_bytes)

    def _check_tensors(self, payload_bytes: int) -> None:
        at = 0
        for spec in self.tensors:
            if spec.dtype not in DTYPE_ITEMSIZE or len(spec.group) > MAX_NAME_CHARS:
                raise RecordError(RecordReason.HEADER, f"dtype {spec.dtype[:MAX_NAME_CHARS]!r}")
            if len(spec.shape) > MAX_DIMENSIONS or any(
                not 0 <= n <= MAX_DIMENSION for n in spec.shape
            ):
                raise RecordError(RecordReason.BOUNDS, f"shape {spec.shape}")
            if spec.offset < at or spec.length < 0 or spec.offset + spec.length > payload_bytes:
                raise RecordError(
                    RecordReason.BOUNDS,
                    f"tensor at {spec.offset}+{spec.length} of {payload_bytes} bytes",
                )
            if (
                self.serde == RAW_SERDE
                and spec.length != math.prod(spec.shape) * DTYPE_ITEMSIZE[spec.dtype]
            ):
                raise RecordError(
                    RecordReason.BOUNDS, f"{spec.length} bytes for {spec.shape} of {spec.dtype}"
                )
            at = spec.offset + spec.length
        if at != payload_bytes:
            raise RecordError(RecordReason.BOUNDS, f"tensors end at {at} of {payload_bytes} bytes")


def raw_header(
    key: CacheEngineKey, shape: Sequence[int], dtype: object, digest: bytes
) -> RecordHeader:
    """Return the header of a record that holds one raw tensor.

    Args:
        dtype: Its dtype, a `torch.dtype` or its name.
        digest: `payload_digest` of its bytes.
    """
    spec = TensorSpec(
        key.group, dtype_name(dtype), tuple(int(n) for n in shape), 0, num_bytes(shape, dtype)
    )
    return RecordHeader(key.canonical(), RAW_SERDE, "", False, (spec,), digest)
