"""What an encoded record is once its payload is decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmcache_core.errors import RecordError
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record.codec import MAX_PAYLOAD_BYTES
from lmcache_core.record.digest import UNSEALED_DIGEST
from lmcache_core.record.header import (
    RAW_SERDE,
    REPORT_EXTENSION,
    RecordHeader,
    RecordReason,
    TensorSpec,
)


def decoded_bytes(header: RecordHeader) -> int:
    """Bytes of the decoded payload: its tensors, one behind the other.

    Raises:
        RecordError: More than a payload may have.
    """
    size = sum(num_bytes(spec.shape, spec.dtype) for spec in header.tensors)
    if size > MAX_PAYLOAD_BYTES:
        raise RecordError(
            RecordReason.BOUNDS,
            f"{size} bytes when decoded; a payload has at most {MAX_PAYLOAD_BYTES}",
        )
    return size


def decoded_header(header: RecordHeader) -> RecordHeader:
    """Header of the decoded payload, its digest still to be computed.

    Key, profile and the lossy mark are kept, so that values that are not those which were stored
    never pass for them. What the encoder measured was of the encoded payload, and is left out.
    """
    extensions = tuple(
        extension for extension in header.extensions if extension.id != REPORT_EXTENSION
    )
    tensors = tuple(_one_behind_the_other(header.tensors))
    return RecordHeader(
        header.key, RAW_SERDE, header.profile, header.lossy, tensors, UNSEALED_DIGEST, extensions
    )


def _one_behind_the_other(tensors: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    at = 0
    for spec in tensors:
        length = num_bytes(spec.shape, spec.dtype)
        yield TensorSpec(spec.group, spec.dtype, spec.shape, at, length)
        at += length
