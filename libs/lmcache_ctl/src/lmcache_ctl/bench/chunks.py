"""Chunks for a bench, under names that nobody else has."""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import Final

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import UNSEALED_DIGEST, Chunk, raw_header

MODEL: Final = "lmcachectl-bench"
NONCE_BYTES: Final = 16
TIER: Final = "bench"
RANDOM_BYTES: Final = 1 << 20


class BenchChunks:
    """Chunks by their number. Their bytes differ in the first 16.

    Args:
        chunk_bytes: Payload of each.

    Attributes:
        num_begun: One more than the highest number that was made.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._model = f"{MODEL}/{secrets.token_hex(8)}"
        self._num_bytes = chunk_bytes
        self._bytes = os.urandom(min(chunk_bytes, RANDOM_BYTES)) * (chunk_bytes // RANDOM_BYTES + 1)
        self.num_begun = 0

    def key(self, number: int) -> ChunkKey:
        """Its name; the tenant is the one that the server knows the token's owner as."""
        chunk_hash = hashlib.sha256(str(number).encode()).hexdigest()
        return ChunkKey("default", CacheEngineKey("bench", self._model, 1, 0, chunk_hash))

    def make(self, number: int) -> Chunk:
        """The chunk, with its digest."""
        payload = (number.to_bytes(NONCE_BYTES, "little") + self._bytes)[: self._num_bytes]
        self.num_begun = max(self.num_begun, number + 1)
        key = self.key(number)
        header = raw_header(key.key, (self._num_bytes,), "uint8", UNSEALED_DIGEST)
        return Chunk.unsealed(key, header, BytesBufferMemoryObj(payload), TIER).sealed()
