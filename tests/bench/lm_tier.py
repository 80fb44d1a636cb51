"""Tiers by themselves: lm:// to a real cache_storage process, and the disk. Calls end with
verified bytes in arena memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import ArenaAllocator, MemoryFormat, MemoryObj
from lmcache_core.record import Chunk, encode_head, payload_digest, raw_header
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.measure import Figure, timed
from tests.bench.shape import CHUNK_BYTES, NUM_CHUNKS, TOTAL_BYTES

ARENA_BYTES = 2 * TOTAL_BYTES + (16 << 20)
TIMEOUT_S = 120.0


class Bench:
    """Chunks in an arena, written to and read from one tier."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, Any]], Any], backend: StorageBackend
    ) -> None:
        self._run = run
        self._backend = backend
        self._arena = ArenaAllocator.anonymous(ARENA_BYTES)
        self._payloads = [self._payload(i) for i in range(NUM_CHUNKS)]

    def measure(
        self, name: str, limits: tuple[Figure, Figure], notes: tuple[str, str]
    ) -> list[Figure]:
        """Put and get of all chunks; the digests are computed in the put and checked in the get."""
        self._run(self._backend.open())
        put = timed(
            self._put, lambda turn: self._run(self._backend.batched_remove(self._keys(turn - 1)))
        )
        last = len(put)
        get = timed(lambda turn: self._get(self._keys(last)))
        self._run(self._backend.close())
        return [
            Figure(f"{name}: store", TOTAL_BYTES, put, limits[0], notes[0]),
            Figure(f"{name}: retrieve", TOTAL_BYTES, get, limits[1], notes[1]),
        ]

    def _put(self, turn: int) -> None:
        chunks = []
        for key, memory in zip(self._keys(turn), self._payloads, strict=True):
            header = raw_header(key.key, (CHUNK_BYTES,), "uint8", payload_digest(memory.byte_array))
            chunks.append(Chunk(key, header, encode_head(header, CHUNK_BYTES), memory, "bench"))
        if not all(self._run(self._backend.batched_put(chunks))):
            raise AssertionError("a chunk was not stored")

    def _get(self, keys: list[ChunkKey]) -> None:
        results = self._run(self._backend.batched_get(keys, self._allocate))
        for result, payload in zip(results, self._payloads, strict=True):
            if (
                not isinstance(result, Chunk)
                or result.memory.byte_array[:64] != payload.byte_array[:64]
            ):
                raise AssertionError(f"not served: {result}")
            result.release()

    def _keys(self, turn: int) -> list[ChunkKey]:
        return [
            ChunkKey.of("default", CacheEngineKey("vllm", "bench", 1, 0, f"{turn:032x}{i:032x}"))
            for i in range(NUM_CHUNKS)
        ]

    def _allocate(self, num_bytes: int) -> MemoryObj | None:
        return self._arena.allocate((num_bytes,), None, MemoryFormat.BINARY)

    def _payload(self, seed: int) -> MemoryObj:
        memory = self._allocate(CHUNK_BYTES)
        assert memory is not None
        memory.tensor.random_(generator=torch.Generator().manual_seed(seed))
        return memory


def lm_figures(directory: Path, limit: Figure) -> list[Figure]:
    """One client, one cache_storage process, loopback."""
    settings = {"port": 0, "lm_port": 0, "memory_gb": 1.25, "instance_id": "bench"}
    with Processes(directory, quiet_environment()) as processes, asyncio.Runner() as runner:
        _, ports = processes.start_service("cache_storage", "lmcache_storage", settings)
        backend = create_remote_backend(f"lm://127.0.0.1:{ports['lm_port']}", timeout_s=TIMEOUT_S)
        notes = (
            "two processes on two cores, each digests every byte beside moving it",
            "the same; the event loop's receive path against a bare recv_into",
        )
        return Bench(runner.run, backend).measure("lm:// to cache_storage", (limit, limit), notes)
