"""The identity chain: the exact bytes that a chunk hash covers. Only `tokens_as_uint32` needs
numpy.

Source: `docs/protocols.md`, "Identity". Golden vectors: `tests/contract/golden/identity.json`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.errors import IdentityError
from lmcache_core.keys import MAX_TOKEN_ID, CacheEngineKey, Lane
from lmcache_core.token_database.base import MultimodalSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

IDENTITY_VERSION = b"lmcache/identity/1"
CHUNK_TAG = b"lmcache/chunk/1\0"
TOKEN_BYTES = 4

_LENGTH = struct.Struct("<I")
_SPAN = struct.Struct("<qI")
NO_EXTRAS = _LENGTH.pack(0)
"""`extras_i` of a chunk that no multimodal content overlaps."""


def identity_root(metadata: LMCacheEngineMetadata, salt: str = "") -> bytes:
    """Return SHA-256 over the identity of the KV: model, revision, dtype, layout, adapter, salt. 32
    bytes, the chain's `h_{-1}`.

    Raises:
        IdentityError: A field is not Unicode text.
    """
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
        try:
            digest.update(_prefixed(text.encode("utf-8")))
        except UnicodeEncodeError as exc:
            raise IdentityError(
                f"{name} {text[:80]!r} is not Unicode text ({exc.reason}); choose another"
            ) from exc
    return digest.digest()


def tokens_as_uint32(tokens: Any) -> npt.NDArray[np.uint32]:
    """Return token ids as contiguous little-endian uint32, regardless of their integer dtype: equal
    ids give equal keys.

    Raises:
        ValueError: Not a 1-D sequence of integers in 0 … 2^32-1.
    """
    import numpy as np

    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as exc:  # rows of several lengths, or no dtype of numpy's
        raise ValueError(f"tokens must be one row of integers in CPU memory: {exc}") from exc
    if array.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, not {array.dtype}")
    # Read as unsigned, negative numbers are the largest: one pass detects both errors.
    num_bits = 8 * array.dtype.itemsize - (array.dtype.kind == "i")
    as_unsigned = array.view(array.dtype.str.replace("i", "u"))
    if int(as_unsigned.max()) > min(MAX_TOKEN_ID, (1 << num_bits) - 1):
        if int(array.min()) < 0:
            raise ValueError(f"token id {int(array.min())} is negative")
        raise ValueError(f"token id {int(array.max())} is above 2^32-1")
    return np.ascontiguousarray(array, dtype="<u4")


def tokens_as_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the bytes of `tokens_as_uint32` without numpy, for processes that hash few prompts.

    Raises:
        ValueError: A token id is outside 0 … 2^32-1.
    """
    if token_ids and min(token_ids) < 0:
        raise ValueError(f"token id {min(token_ids)} is negative")
    if token_ids and max(token_ids) > MAX_TOKEN_ID:
        raise ValueError(f"token id {max(token_ids)} is above 2^32-1")
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def chain_hashes(
    root: bytes,
    tokens: npt.NDArray[np.uint32],
    chunk_size: int,
    spans: Sequence[MultimodalSpan] = (),
    first: int = 0,
) -> Iterator[tuple[int, int, bytes]]:
    """Yield `(start, end, h_i)` for each chunk, `h_i = SHA-256(tag || h_{i-1} || n_i || tokens ||
    extras_i)`.

    Args:
        root: 32 bytes from `identity_root`; with `first`, the hash of the chunk before it.
        tokens: From `tokens_as_uint32`, shape `[seq_len]`.
        spans: Multimodal contents; each enters the hash of every chunk that it overlaps.
        first: Where to begin, a multiple of `chunk_size`.
    """
    return chain_hashes_of_bytes(root, tokens.view("u1").data, chunk_size, spans, first)


def chain_hashes_of_bytes(
    root: bytes,
    data: bytes | memoryview,
    chunk_size: int,
    spans: Sequence[MultimodalSpan] = (),
    first: int = 0,
) -> Iterator[tuple[int, int, bytes]]:
    """Yield as `chain_hashes` does, for bytes from `tokens_as_bytes`."""
    num_tokens = len(data) // TOKEN_BYTES
    extras = extras_of_chunks(spans, num_tokens, chunk_size)
    # A copy of a digest that has consumed the tag, and updates instead of one joined message: the
    # fewest copies per chunk.
    tagged = hashlib.sha256(CHUNK_TAG)
    full_length = _LENGTH.pack(chunk_size)
    previous = root
    for start in range(first, num_tokens, chunk_size):
        end = start + chunk_size
        length = full_length
        if end > num_tokens:
            end = num_tokens
            length = _LENGTH.pack(end - start)
        sha = tagged.copy()
        sha.update(previous + length)
        sha.update(data[start * TOKEN_BYTES : end * TOKEN_BYTES])
        sha.update(extras.get(start, NO_EXTRAS))
        previous = sha.digest()
        yield start, end, previous


def named_chunks(
    metadata: LMCacheEngineMetadata, chain: Iterable[tuple[int, int, bytes]]
) -> Iterator[tuple[int, int, CacheEngineKey]]:
    """Yield the chunks of a hash chain with their keys instead of their hashes."""
    lane = Lane(metadata.fmt, metadata.model_name, metadata.world_size, metadata.worker_id)
    for start, end, digest in chain:
        yield start, end, lane.key(digest)


def extras_of_chunks(
    spans: Sequence[MultimodalSpan], num_tokens: int, chunk_size: int
) -> dict[int, bytes]:
    """Return `extras_i` of the chunks that spans overlap, by the chunk's first token; all others
    have `NO_EXTRAS`.
    """
    inside: dict[int, list[MultimodalSpan]] = {}
    inside_sequence = (span for span in spans if span.offset < num_tokens)
    for span in sorted(inside_sequence, key=lambda s: (s.offset, s.length, s.content_hash)):
        first = span.offset - span.offset % chunk_size
        for start in range(first, min(span.offset + span.length, num_tokens), chunk_size):
            inside.setdefault(start, []).append(span)
    return {start: _extras(overlapping, start) for start, overlapping in inside.items()}


def _extras(spans: Sequence[MultimodalSpan], start: int) -> bytes:
    parts = [_LENGTH.pack(len(spans))]
    for span in spans:
        parts.append(_prefixed(span.content_hash))
        parts.append(_SPAN.pack(span.offset - start, span.length))
    return b"".join(parts)


def _prefixed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data
