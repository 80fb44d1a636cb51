"""The identity chain: what a chunk hash covers, byte by byte.

Source: `docs/protocols.md`, "Identity". Golden vectors: `tests/contract/golden/identity.json`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.token_database.base import MultimodalSpan

if TYPE_CHECKING:
    import numpy.typing as npt

IDENTITY_VERSION = b"lmcache/identity/1"
CHUNK_TAG = b"lmcache/chunk/1\0"
MAX_TOKEN_ID = 0xFFFFFFFF

_LENGTH = struct.Struct("<I")
_SPAN = struct.Struct("<qI")


def identity_root(metadata: LMCacheEngineMetadata, salt: str = "") -> bytes:
    """SHA-256 over what the KV is: model, revision, dtype, layout, adapter, salt. 32 bytes, the chain's `h_{-1}`."""
    fields = (
        ("model", metadata.model_name),
        ("revision", metadata.revision),
        ("dtype", metadata.kv_dtype_name),
        ("layout", metadata.layout_fingerprint()),
        ("adapter", metadata.adapter),
        ("salt", salt),
    )
    digest = hashlib.sha256(_prefixed(IDENTITY_VERSION))
    for name, text in fields:
        digest.update(_prefixed(name.encode("ascii")))
        digest.update(_prefixed(text.encode("utf-8")))
    return digest.digest()


def tokens_as_uint32(tokens: Any) -> npt.NDArray[np.uint32]:
    """Token ids as contiguous little-endian uint32, whatever integer dtype they came in: equal ids give equal keys.

    Raises:
        ValueError: Not a 1-D sequence of integers in 0 … 2^32-1.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, not {array.dtype}")
    if array.dtype.kind == "i" and int(array.min()) < 0:
        raise ValueError(f"token id {int(array.min())} is negative")
    if array.dtype.itemsize > 4 and int(array.max()) > MAX_TOKEN_ID:
        raise ValueError(f"token id {int(array.max())} is above 2^32-1")
    return np.ascontiguousarray(array, dtype="<u4")


def chain_hashes(
    root: bytes, tokens: npt.NDArray[np.uint32], chunk_size: int, spans: Sequence[MultimodalSpan] = ()
) -> Iterator[tuple[int, int, bytes]]:
    """Yield `(start, end, h_i)` for each chunk, `h_i = SHA-256(tag || h_{i-1} || n_i || tokens || extras_i)`.

    Args:
        root: 32 bytes from `identity_root`.
        tokens: From `tokens_as_uint32`, shape `[seq_len]`.
        chunk_size: Tokens in a full chunk.
        spans: Multimodal contents; each enters the hash of every chunk that it overlaps.
    """
    previous = root
    view = tokens.view(np.uint8).data
    for start in range(0, len(tokens), chunk_size):
        end = min(start + chunk_size, len(tokens))
        previous = hashlib.sha256(
            b"".join((CHUNK_TAG, previous, _LENGTH.pack(end - start), view[start * 4 : end * 4], _extras(spans, start, end)))
        ).digest()
        yield start, end, previous


def _extras(spans: Sequence[MultimodalSpan], start: int, end: int) -> bytes:
    inside = [s for s in spans if s.offset < end and s.offset + s.length > start]
    parts = [_LENGTH.pack(len(inside))]
    for span in sorted(inside, key=lambda s: (s.offset, s.length, s.content_hash)):
        parts.append(_prefixed(span.content_hash))
        parts.append(_SPAN.pack(span.offset - start, span.length))
    return b"".join(parts)


def _prefixed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data
