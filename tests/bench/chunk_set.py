"""Chunks in an arena, to be written to and read from a tier by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryFormat, MemoryObj
from lmcache_core.record import UNSEALED_DIGEST, Chunk, Result, raw_header

from tests.bench.shape import CHUNK_BYTES, NUM_CHUNKS

SPARE_BYTES = 16 << 20
SAMPLE_BYTES = 64


class ChunkSet:
    """As many chunks as a prompt has, with payloads that stay the same and keys that are new each
    round.

    They come without digests, as the engine puts them: whoever writes them to a file or a socket
    computes these.
    """

    def __init__(self) -> None:
        self._arena = ArenaAllocator.anonymous(2 * NUM_CHUNKS * CHUNK_BYTES + SPARE_BYTES)
        self.payloads = [self._payload(i) for i in range(NUM_CHUNKS)]

    def keys(self, turn: int) -> list[ChunkKey]:
        """Names of the chunks of that round."""
        return [
            ChunkKey.of("default", CacheEngineKey("vllm", "bench", 1, 0, f"{turn:032x}{i:032x}"))
            for i in range(NUM_CHUNKS)
        ]

    def chunks(self, turn: int) -> list[Chunk]:
        """The chunks of that round, borrowed."""
        headers = [
            raw_header(key.key, (CHUNK_BYTES,), "uint8", UNSEALED_DIGEST) for key in self.keys(turn)
        ]
        return [
            Chunk.unsealed(key, header, memory, "bench")
            for key, header, memory in zip(self.keys(turn), headers, self.payloads, strict=True)
        ]

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Where a tier puts what it reads: touched memory."""
        return self._arena.allocate((num_bytes,), None, MemoryFormat.BINARY)

    def take(self, results: Sequence[Result]) -> None:
        """Look at what was read and give it back.

        Raises:
            AssertionError: Something was not served, or is not what was put.
        """
        for result, payload in zip(results, self.payloads, strict=True):
            if (
                not isinstance(result, Chunk)
                or result.memory.byte_array[:SAMPLE_BYTES] != payload.byte_array[:SAMPLE_BYTES]
            ):
                raise AssertionError(f"not served: {result}")
            result.release()

    def _payload(self, seed: int) -> MemoryObj:
        memory = self.allocate(CHUNK_BYTES)
        assert memory is not None
        memory.tensor.random_(generator=torch.Generator().manual_seed(seed))
        return memory
