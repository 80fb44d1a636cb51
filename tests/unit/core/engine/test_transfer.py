"""Store, lookup and retrieve around the edges: what vanishes in between, what is cut short, what
is slow, what is closed.
"""

from __future__ import annotations

import asyncio
import threading
import time
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
from lmcache_core.storage.manager import MARGIN_S
from lmcache_core.telemetry import (
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
)

from tests.fixtures.embedded import PATIENT, Embedded, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of
from tests.suites.faults import ForwardingBackend

TOKENS = tokens_of((0, 1, 0, 0))
NUM_CHUNKS = 4
TIERS = ["memory", "disk", "peers", "storage"]
NOISE_S = 10.0


@pytest.fixture(params=["hot", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Embedded]:
    with embedded_engine(tmp_path if request.param == "disk" else None) as opened:
        yield opened


def store(cache: Embedded, tokens: torch.Tensor = TOKENS) -> None:
    cache.engine.store(tokens, kvcaches=kv_of(tokens))


def retrieve(cache: Embedded, tokens: torch.Tensor = TOKENS) -> int:
    """How many tokens come back, from the first."""
    target = empty_kv(len(tokens))
    loaded = cache.engine.retrieve(tokens, kvcaches=target)
    num = int(loaded.sum())
    assert loaded.tolist() == [i < num for i in range(len(tokens))]
    assert_equal_prefix(target, kv_of(tokens), num)
    return num


@pytest.mark.parametrize("gone", range(NUM_CHUNKS))
def test_what_stands_before_a_chunk_that_vanishes_is_reused(cache: Embedded, gone: int) -> None:
    store(cache)
    assert cache.engine.lookup(TOKENS) == len(TOKENS)
    assert cache.manager.evict(cache.keys(TOKENS)[gone : gone + 1]) == 1
    assert retrieve(cache) == gone * CHUNK_SIZE
    cache.check_nothing_held()
    store(cache)
    assert retrieve(cache) == len(TOKENS)


def test_a_chunk_that_leaves_memory_in_the_middle_of_a_retrieve_comes_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment when all seemed to be hot and the moment when they are taken."""
    with embedded_engine(tmp_path) as cache:
        store(cache)
        cache.drain()
        contains = cache.hot.contains_many

        def overtaken(keys: Sequence[ChunkKey]) -> list[bool]:
            found = contains(keys)
            cache.hot.remove_many(keys[2:3])
            return found

        monkeypatch.setattr(cache.hot, "contains_many", overtaken)
        assert retrieve(cache) == len(TOKENS)
        assert cache.engine.counters.value(RETRIEVED_TOKENS_TOTAL, "disk") == CHUNK_SIZE
        cache.check_nothing_held()


class EvictingConnector(VLLMNestedTupleGPUConnector):
    """While it copies one chunk, somebody evicts all of them."""

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


def test_chunks_that_are_being_copied_outlive_their_eviction() -> None:
    connector = EvictingConnector(HIDDEN, NUM_LAYERS)
    with embedded_engine(num_chunks=6, connector=connector) as cache:
        store(cache)
        connector.cache = cache
        assert retrieve(cache) == len(TOKENS)
        connector.cache = None
        assert retrieve(cache) == 0


@pytest.mark.parametrize(
    "num_tokens", [1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5]
)
def test_the_last_chunk_may_be_short(cache: Embedded, num_tokens: int) -> None:
    tokens = TOKENS[:num_tokens]
    store(cache, tokens)
    assert cache.engine.lookup(tokens) == num_tokens
    assert retrieve(cache, tokens) == num_tokens
    num_whole = num_tokens // CHUNK_SIZE * CHUNK_SIZE
    assert cache.engine.lookup(TOKENS) == num_whole, "a short chunk is none of a longer prompt"
    assert retrieve(cache) == num_whole
    assert cache.engine.counters.value(STORED_BYTES_TOTAL) == num_tokens * CHUNK_BYTES // CHUNK_SIZE


def test_nothing_asked_is_nothing_done(cache: Embedded) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    store(cache, nothing)
    cache.engine.prefetch(nothing)
    assert cache.engine.lookup(nothing) == 0
    assert cache.engine.retrieve(nothing, kvcaches=empty_kv(0)).shape == (0,)
    masked = torch.zeros(len(TOKENS), dtype=torch.bool)
    cache.engine.store(TOKENS, masked, kvcaches=kv_of(TOKENS))
    cache.engine.prefetch(TOKENS, masked)
    assert not cache.engine.retrieve(TOKENS, masked, kvcaches=empty_kv(len(TOKENS))).any()
    assert cache.engine.counters.value(STORED_CHUNKS_TOTAL) == 0
    assert cache.misses() == {}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_tokens_of_any_integer_type_are_the_same_tokens(dtype: torch.dtype) -> None:
    tokens = torch.arange(2 * CHUNK_SIZE)
    with embedded_engine() as cache:
        store(cache, tokens.to(dtype))
        assert cache.engine.lookup(tokens) == len(tokens)
        assert retrieve(cache, tokens) == len(tokens)


def test_kv_that_is_missing_is_refused_and_nothing_is_held(cache: Embedded) -> None:
    with pytest.raises(ValueError, match="kvcaches is missing"):
        cache.engine.store(TOKENS)
    assert cache.engine.lookup(TOKENS) == 0
    store(cache)
    with pytest.raises(ValueError, match="kvcaches is missing"):
        cache.engine.retrieve(TOKENS)
    with pytest.raises(ValueError, match="kvcaches"):
        cache.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS) - 1))
    cache.check_nothing_held()
    assert cache.engine.counters.value(RETRIEVED_TOKENS_TOTAL) == 0
    assert retrieve(cache) == len(TOKENS)


def test_lookup_can_be_confined_to_tiers(tmp_path: Path) -> None:
    with embedded_engine(tmp_path) as cache:
        store(cache)
        cache.drain()
        cache.hot.remove_many([ChunkKey.of(DEFAULT_TENANT, key) for key in cache.keys(TOKENS)[2:]])
        found = {name: cache.engine.lookup(TOKENS, [name]) for name in TIERS}
        assert found == {
            "memory": 2 * CHUNK_SIZE,
            "disk": len(TOKENS),
            "peers": 0,
            "storage": 0,
        }
        documented = ["Hot", "LocalDiskBackend", "P2PBackend", "RemoteBackend"]
        assert [cache.engine.lookup(TOKENS, [name]) for name in documented] == [*found.values()]
        assert cache.engine.lookup(TOKENS, TIERS) == cache.engine.lookup(TOKENS) == len(TOKENS)
        assert cache.engine.lookup(TOKENS, []) == 0
        for unknown in (["memory", "hot"], [""], ["LocalDisk"]):
            with pytest.raises(ValueError, match=repr(unknown[-1])):
                cache.engine.lookup(TOKENS, unknown)


def test_a_store_that_finds_no_room_for_all_keeps_the_first(tmp_path: Path) -> None:
    with embedded_engine(num_chunks=3) as cache:
        store(cache)
        assert cache.engine.counters.value(STORED_CHUNKS_TOTAL) == 3
        assert cache.engine.counters.value(UNSTORED_CHUNKS_TOTAL) == 1
        assert retrieve(cache) == 3 * CHUNK_SIZE


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """What allows files to be written, and one entry for each that was."""
    may_write, written = threading.Event(), list[int]()
    write = DiskFiles.write

    def gated(self: DiskFiles, fd: int, buffers: Sequence[bytes | memoryview]) -> None:
        assert may_write.wait(60.0)
        write(self, fd, buffers)
        written.append(fd)

    monkeypatch.setattr(DiskFiles, "write", gated)
    yield may_write, written
    may_write.set()


def test_store_does_not_wait_for_slow_tiers(tmp_path: Path, writes: Any) -> None:
    may_write, written = writes
    with embedded_engine(tmp_path, close_drain_s=60.0, **PATIENT) as cache:
        store(cache)
        assert retrieve(cache) == len(TOKENS), "and it is there at once"
        assert written == []
        may_write.set()
    assert len(written) == NUM_CHUNKS, "a close finishes what is to be written"
    with embedded_engine(tmp_path) as cache:
        assert retrieve(cache) == len(TOKENS)


@pytest.mark.parametrize("close_drain_s", [0.0, 0.2])
def test_close_abandons_what_takes_too_long(
    tmp_path: Path, writes: Any, close_drain_s: float
) -> None:
    with embedded_engine(tmp_path, close_drain_s=close_drain_s) as cache:
        store(cache)
        until(lambda: bool(cache.stack._writers["disk"]._writing), "nothing is written")
        begin = time.monotonic()
        cache.engine.close()
        assert time.monotonic() - begin < close_drain_s + MARGIN_S + NOISE_S
        assert cache.engine.lookup(TOKENS) == 0
        writes[0].set()


class Lingering(ForwardingBackend):
    """Its reads end when it has been closed; its close may last."""

    def __init__(self, backend: StorageBackend, close_s: float = 0.0) -> None:
        super().__init__(backend)
        self.is_closed = asyncio.Event()
        self.num_reading = 0
        self._close_s = close_s

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
        await asyncio.sleep(self._close_s)
        await super().close()
        self.is_closed.set()


@pytest.mark.parametrize("close_s", [0.0, 60.0])
def test_a_read_that_a_close_overtakes_leaves_nothing_in_memory(
    tmp_path: Path, close_s: float
) -> None:
    with embedded_engine(
        tmp_path, wrap=lambda tier: Lingering(tier, close_s), tier_timeout_s=60.0, close_drain_s=0.1
    ) as cache:
        store(cache)
        cache.drain()
        cache.hot.remove_many([ChunkKey.of(DEFAULT_TENANT, key) for key in cache.keys(TOKENS)[1:]])
        tier = cache.lower(Lingering)
        assert isinstance(tier, Lingering)
        loaded: list[int] = []
        reading = threading.Thread(target=lambda: loaded.append(retrieve(cache)))
        reading.start()
        until(lambda: tier.num_reading == 1, "nobody reads")
        begin = time.monotonic()
        cache.engine.close()
        assert time.monotonic() - begin < 0.1 + MARGIN_S + NOISE_S
        reading.join(5.0)
        assert loaded in ([0], [len(TOKENS)])
        assert cache.allocator.used_bytes == 0


def test_a_store_that_a_close_overtakes_leaves_nothing_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with embedded_engine() as cache:
        put_many = cache.hot.put_many

        def overtaken(chunks: Sequence[Chunk]) -> list[bool]:
            closing = threading.Thread(target=cache.engine.close)
            closing.start()
            closing.join()
            return put_many(chunks)

        monkeypatch.setattr(cache.hot, "put_many", overtaken)
        store(cache)
        assert cache.allocator.used_bytes == 0
