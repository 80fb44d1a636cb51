"""The digest of a payload: xxh3-128, 16 bytes in its canonical (big-endian) form."""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16
UNSEALED_DIGEST = bytes(DIGEST_BYTES)
"""Stands in a header whose digest is still to be computed."""


def payload_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """Return xxh3-128 of the payload. Releases the GIL while it reads."""
    return xxhash.xxh3_128_digest(payload)


def payload_hasher() -> xxhash.xxh3_128:
    """Return the same digest of a payload that comes in pieces: give them to `update`, in order,
    then ask for `digest()`.
    """
    return xxhash.xxh3_128()
