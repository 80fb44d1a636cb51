"""Store, lookup and retrieve when chunks vanish, memory is short, tiers are slow, or the engine is
closed meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import DEFAULT_TENANT, ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskFiles
from lmcache_core.telemetry import (
    RETRIEVED_TOKENS_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
)

from tests.fixtures.embedded import PATIENT, Embedded, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, empty_kv
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of
from tests.suites.faults import ForwardingBackend

TOKENS = tokens_of((0, 1, 0, 0))
NUM_CHUNKS = 4
PATIENCE_S = 60.0


@pytest.fixture(params=["hot", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Embedded]:
    with embedded_engine(tmp_path if request.param == "disk" else None, **PATIENT) as opened:
        yield opened


def test_a_chunk_that_leaves_memory_in_the_middle_of_a_retrieve_comes_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all chunks were found in memory, and before they are read."""
    with embedded_engine(tmp_path, **PATIENT) as cache:
        cache.store(TOKENS)
        cache.drain()
        contains = cache.hot.contains_many

        def overtaken(keys: Sequence[ChunkKey]) -> list[bool]:
            found = contains(keys)
            cache.hot.remove_many(keys[2:3])
            return found

        monkeypatch.setattr(cache.hot, "contains_many", overtaken)
        assert cache.retrieve(TOKENS) == len(TOKENS)
        assert cache.engine.counters.value(RETRIEVED_TOKENS_TOTAL, "disk") == CHUNK_SIZE
        cache.check_nothing_held()


class EvictingConnector(VLLMNestedTupleGPUConnector):
    """While it copies one chunk, all of them are evicted and their memory is written to."""

    cache: Embedded | None = None

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        if self.cache is not None:
            self.cache.manager.evict(self.cache.keys(TOKENS))
            for memory in self.cache.manager.reserve(
                self.cache.keys(TOKENS)[:NUM_CHUNKS], [(CHUNK_BYTES,)] * NUM_CHUNKS, "uint8"
            ):
                if not isinstance(memory, NotLent):
                    memory.byte_array[:] = b"\xff" * CHUNK_BYTES
                    self.cache.manager.abort([memory])
        super().to_gpu(memory_obj, start, end, **kwargs)


def test_chunks_being_copied_outlive_their_eviction() -> None:
    connector = EvictingConnector(HIDDEN, NUM_LAYERS)
    with embedded_engine(num_chunks=6, connector=connector) as cache:
        cache.store(TOKENS)
        connector.cache = cache
        assert cache.retrieve(TOKENS) == len(TOKENS)
        connector.cache = None
        assert cache.retrieve(TOKENS) == 0


def test_a_call_for_no_tokens_does_nothing(cache: Embedded) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    cache.store(nothing)
    cache.engine.prefetch(nothing)
    assert cache.engine.lookup(nothing) == 0
    assert cache.engine.retrieve(nothing, kvcaches=empty_kv(0)).shape == (0,)
    masked = torch.zeros(len(TOKENS), dtype=torch.bool)
    cache.engine.store(TOKENS, masked, kvcaches=kv_of(TOKENS))
    cache.engine.prefetch(TOKENS, masked)
    assert not cache.engine.retrieve(TOKENS, masked, kvcaches=empty_kv(len(TOKENS))).any()
    assert cache.engine.counters.value(STORED_CHUNKS_TOTAL) == 0
    assert cache.misses() == {}


class Gate:
    """Files are written once they may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.num_begun = 0
        self.num_written = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, write = Gate(), DiskFiles.write

    def gated(self: DiskFiles, fd: int, buffers: Sequence[bytes | memoryview]) -> None:
        made.num_begun += 1
        assert made.may_write.wait(PATIENCE_S)
        write(self, fd, buffers)
        made.num_written += 1

    monkeypatch.setattr(DiskFiles, "write", gated)
    yield made
    made.may_write.set()


@pytest.mark.parametrize("close_drain_s", [0.0, 0.2])
def test_close_abandons_writes_that_take_too_long(
    tmp_path: Path, gate: Gate, close_drain_s: float
) -> None:
    with embedded_engine(tmp_path, close_drain_s=close_drain_s, **PATIENT) as cache:
        cache.store(TOKENS)
        until(lambda: gate.num_begun, "nothing is written")
        cache.engine.close()
        assert gate.num_written == 0
        assert cache.engine.lookup(TOKENS) == 0
        gate.may_write.set()


class Lingering(ForwardingBackend):
    """Its reads end when it has been closed; its close may hang."""

    def __init__(self, backend: StorageBackend, close_hangs: bool) -> None:
        super().__init__(backend)
        self.is_closed = asyncio.Event()
        self.num_reading = 0
        self._close_hangs = close_hangs

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        results = await super().batched_get(keys, allocate, timeout_s)
        self.num_reading += 1
        try:
            await self.is_closed.wait()
        except BaseException:
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return results

    async def close(self) -> None:
        if self._close_hangs:
            await asyncio.Event().wait()
        await super().close()
        self.is_closed.set()


@pytest.mark.parametrize("close_hangs", [False, True])
def test_a_read_during_a_close_leaves_nothing_in_memory(tmp_path: Path, close_hangs: bool) -> None:
    with embedded_engine(
        tmp_path,
        wrap=lambda tier: Lingering(tier, close_hangs),
        tier_timeout_s=PATIENCE_S,
        close_drain_s=0.1,
    ) as cache:
        cache.store(TOKENS)
        cache.drain()
        cache.hot.remove_many([ChunkKey.of(DEFAULT_TENANT, key) for key in cache.keys(TOKENS)[1:]])
        tier = cache.lower(Lingering)
        assert isinstance(tier, Lingering)
        loaded: list[int] = []
        reading = threading.Thread(target=lambda: loaded.append(cache.retrieve(TOKENS)))
        reading.start()
        until(lambda: tier.num_reading == 1, "nothing is read")
        cache.engine.close()
        reading.join(PATIENCE_S)
        assert loaded in ([0], [len(TOKENS)])
        assert cache.allocator.used_bytes == 0


def test_a_store_during_a_close_leaves_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with embedded_engine() as cache:
        put_many = cache.hot.put_many

        def overtaken(chunks: Sequence[Chunk]) -> list[bool]:
            closing = threading.Thread(target=cache.engine.close)
            closing.start()
            closing.join()
            return put_many(chunks)

        monkeypatch.setattr(cache.hot, "put_many", overtaken)
        cache.store(TOKENS)
        assert cache.allocator.used_bytes == 0


def test_a_store_without_room_for_all_chunks_keeps_the_first() -> None:
    with embedded_engine(num_chunks=3) as cache:
        cache.store(TOKENS)
        assert cache.engine.counters.value(STORED_CHUNKS_TOTAL) == 3
        assert cache.engine.counters.value(UNSTORED_CHUNKS_TOTAL) == 1
        assert cache.retrieve(TOKENS) == 3 * CHUNK_SIZE


def test_store_does_not_wait_for_slow_tiers_and_close_does(tmp_path: Path, gate: Gate) -> None:
    with embedded_engine(tmp_path, close_drain_s=PATIENCE_S, **PATIENT) as cache:
        cache.store(TOKENS)
        assert cache.retrieve(TOKENS) == len(TOKENS), "chunks are hot at once"
        assert gate.num_written == 0
        gate.may_write.set()
    assert gate.num_written == NUM_CHUNKS
    with embedded_engine(tmp_path, **PATIENT) as cache:
        assert cache.retrieve(TOKENS) == len(TOKENS)
