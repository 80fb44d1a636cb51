"""Why a chunk was not served, as the engine counts it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import (
    RAW_SERDE,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    TensorSpec,
    encode_head,
    payload_digest,
)
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.eviction import TierLimits, create_policy
from lmcache_core.storage.guard import Guard
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import RETRIEVED_CHUNKS_TOTAL

from tests.fixtures.embedded import PATIENCE_S, Embedded, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of
from tests.suites.chunks import make_chunk, make_key
from tests.suites.faults import ForwardingBackend

TOKENS = tokens_of((0, 1, 0, 0))
NUM_CHUNKS = 4
TTL_S = 0.15


def retrieve(cache: Embedded, tokens: torch.Tensor = TOKENS) -> int:
    """How many chunks come back; what they hold is right. Behind them may stand a part of one
    that turned out damaged.
    """
    target = empty_kv(len(tokens))
    num = int(cache.engine.retrieve(tokens, kvcaches=target).sum())
    assert_equal_prefix(
        tuple((k[:num], v[:num]) for k, v in target),
        tuple((k[:num], v[:num]) for k, v in kv_of(tokens)),
        num,
    )
    return num // CHUNK_SIZE


def store(cache: Embedded, tokens: torch.Tensor = TOKENS) -> None:
    cache.engine.store(tokens, kvcaches=kv_of(tokens))


def record_path(cache: Embedded, key: CacheEngineKey) -> Path:
    disk = cache.lower(DiskBackend)
    assert isinstance(disk, DiskBackend)
    return disk._layout.record(ChunkKey.of(DEFAULT_TENANT, key))


def put_on_disk(cache: Embedded, key: CacheEngineKey, tensor: TensorSpec) -> None:
    """A whole record of that key which holds that tensor."""
    memory = cache.hot.allocate(tensor.length)
    assert memory is not None
    memory.byte_array[:] = bytes(tensor.length)
    header = RecordHeader(
        key.canonical(), RAW_SERDE, "", False, (tensor,), payload_digest(memory.byte_array)
    )
    chunk = Chunk(
        ChunkKey.of(DEFAULT_TENANT, key), header, encode_head(header, tensor.length), memory, "test"
    )
    assert cache.manager._loop.run(cache.stack.lower[0].batched_put([chunk]), PATIENCE_S) == [True]
    chunk.release()


class Moody(ForwardingBackend):
    """Inside the breaker: away, or lost in thought, when told."""

    is_away = False
    delay_s = 0.0

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        if self.is_away:
            raise UnavailableError("away")
        await asyncio.sleep(self.delay_s)
        return await super().batched_get(keys, allocate, timeout_s)


def moody_of(cache: Embedded) -> Moody:
    """Put a moody tier between the breaker and the disk."""
    breaker = cache.lower(Guard)
    assert isinstance(breaker, Guard)
    moody = Moody(breaker.wrapped)
    breaker._backend = moody
    return moody


@pytest.mark.parametrize("has_disk", [False, True])
def test_never_stored(tmp_path: Path, has_disk: bool) -> None:
    with embedded_engine(tmp_path if has_disk else None) as cache:
        assert retrieve(cache) == 0
        assert cache.misses() == {"never_stored": NUM_CHUNKS}
        store(cache, TOKENS[: 2 * CHUNK_SIZE])
        assert retrieve(cache) == 2
        assert cache.misses() == {"never_stored": NUM_CHUNKS + 2}, (
            "chunks behind the first miss are missed with it"
        )
        assert cache.engine.counters.value(RETRIEVED_CHUNKS_TOTAL, "memory") == 2


def test_masked_tokens_are_not_missed() -> None:
    with embedded_engine() as cache:
        mask = torch.arange(len(TOKENS)) >= 3 * CHUNK_SIZE
        assert not cache.engine.retrieve(TOKENS, mask, kvcaches=empty_kv(len(TOKENS))).any()
        assert cache.misses() == {"never_stored": 1}


def test_evicted() -> None:
    with embedded_engine(num_chunks=6) as cache:
        store(cache)
        store(cache, tokens_of((1, 0, 0, 0)))
        num = retrieve(cache)
        assert num < NUM_CHUNKS
        assert cache.misses() == {"evicted": NUM_CHUNKS - num}


def test_evicted_from_memory_is_no_miss_where_the_disk_has_it(tmp_path: Path) -> None:
    with embedded_engine(tmp_path, num_chunks=12) as cache:
        store(cache)
        cache.drain()
        store(cache, tokens_of((1, 0, 0, 0)))
        cache.hot.evict_bytes(12 * CHUNK_BYTES)
        assert retrieve(cache) == NUM_CHUNKS
        assert cache.misses() == {}


SHAPE = (2, NUM_LAYERS, CHUNK_SIZE, HIDDEN)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(
            TensorSpec("", "float32", (NUM_LAYERS, 2, CHUNK_SIZE, HIDDEN), 0, CHUNK_BYTES),
            id="another shape",
        ),
        pytest.param(
            TensorSpec("", "float16", (2, NUM_LAYERS, CHUNK_SIZE, HIDDEN), 0, CHUNK_BYTES // 2),
            id="another type",
        ),
        pytest.param(
            TensorSpec(
                "", "float32", (2, NUM_LAYERS, CHUNK_SIZE - 1, HIDDEN), 0, CHUNK_BYTES * 15 // 16
            ),
            id="fewer tokens",
        ),
    ],
)
def test_layout(tmp_path: Path, tensor: TensorSpec) -> None:
    with embedded_engine(tmp_path) as cache:
        put_on_disk(cache, cache.keys(TOKENS)[1], tensor)
        store(cache)
        cache.forget_hot()
        assert retrieve(cache) == 1
        assert cache.misses() == {"layout": NUM_CHUNKS - 1}
        cache.check_nothing_held()


def test_identity(tmp_path: Path) -> None:
    """A file that holds the record of another chunk, whole and sound."""
    with embedded_engine(tmp_path) as cache:
        store(cache)
        cache.forget_hot()
        keys = cache.keys(TOKENS)
        shutil.copyfile(record_path(cache, keys[2]), record_path(cache, keys[1]))
        assert retrieve(cache) == 1
        assert cache.misses() == {"identity": NUM_CHUNKS - 1}
        assert retrieve(cache) == 1
        assert cache.misses() == {"identity": NUM_CHUNKS - 1, "never_stored": NUM_CHUNKS - 1}, (
            "it is gone"
        )


@pytest.mark.parametrize("at", [-1, -CHUNK_BYTES])
def test_corrupt_on_disk(tmp_path: Path, at: int) -> None:
    with embedded_engine(tmp_path) as cache:
        store(cache)
        cache.forget_hot()
        path = record_path(cache, cache.keys(TOKENS)[2])
        data = bytearray(path.read_bytes())
        data[at] ^= 0x40
        path.write_bytes(data)
        assert retrieve(cache) == 2
        assert cache.misses() == {"corrupt": NUM_CHUNKS - 2}
        store(cache)
        assert retrieve(cache) == NUM_CHUNKS, "it is stored anew"
        cache.check_nothing_held()


@pytest.mark.parametrize("has_disk", [False, True])
def test_corrupt_in_memory(tmp_path: Path, has_disk: bool) -> None:
    with embedded_engine(tmp_path if has_disk else None, verify_hot="always") as cache:
        store(cache)
        if has_disk:
            cache.drain()
        chunks = cache.manager.get(cache.keys(TOKENS))
        chunks[1].memory.byte_array[100] ^= 0x01
        cache.manager.release(chunks)
        assert retrieve(cache) == 1
        assert cache.misses() == {"corrupt": NUM_CHUNKS - 1}
        cache.check_nothing_held()
        assert retrieve(cache) == (NUM_CHUNKS if has_disk else 1), "the disk's copy is sound"


def test_deadline(tmp_path: Path) -> None:
    with embedded_engine(tmp_path, tier_timeout_s=0.1) as cache:
        store(cache)
        cache.forget_hot()
        store(cache, TOKENS[:CHUNK_SIZE])
        moody_of(cache).delay_s = 60.0
        assert retrieve(cache) == 1
        assert cache.misses() == {"deadline": NUM_CHUNKS - 1}
        cache.check_nothing_held()


def test_unavailable_then_breaker_open(tmp_path: Path) -> None:
    with embedded_engine(tmp_path) as cache:
        store(cache)
        cache.forget_hot()
        moody = moody_of(cache)
        moody.is_away = True
        assert retrieve(cache) == 0
        assert cache.misses() == {"unavailable": NUM_CHUNKS}
        for _ in range(10):
            assert retrieve(cache) == 0
        misses = cache.misses()
        assert set(misses) == {"unavailable", "breaker_open"}
        assert misses["breaker_open"] > 0
        moody.is_away = False
        deadline = time.monotonic() + PATIENCE_S
        while retrieve(cache) < NUM_CHUNKS:
            assert time.monotonic() < deadline, "the tier is never tried again"
            time.sleep(0.02)


def test_unavailable_when_closed() -> None:
    with embedded_engine() as cache:
        store(cache)
        cache.engine.close()
        assert retrieve(cache) == 0
        assert cache.misses() == {"unavailable": NUM_CHUNKS}


def test_no_memory(tmp_path: Path) -> None:
    with embedded_engine(tmp_path, num_chunks=6) as cache:
        for num in range(
            1, NUM_CHUNKS + 1
        ):  # all at once they would be more than may wait to be written
            store(cache, TOKENS[: num * CHUNK_SIZE])
            cache.drain()
        cache.forget_hot()
        taken = cache.manager.reserve(cache.keys(TOKENS)[:4], [SHAPE] * 4, "float32")
        assert retrieve(cache) == 2
        assert cache.misses() == {"no_memory": NUM_CHUNKS - 2}
        cache.manager.abort([memory for memory in taken if not isinstance(memory, NotLent)])
        assert retrieve(cache) == NUM_CHUNKS


@pytest.mark.parametrize("has_disk", [False, True])
def test_expired(tmp_path: Path, has_disk: bool) -> None:
    with embedded_engine(tmp_path if has_disk else None, chunk_ttl_s=TTL_S) as cache:
        store(cache)
        stored = time.monotonic()
        num = retrieve(cache)
        assert num == NUM_CHUNKS or time.monotonic() - stored > TTL_S
        before = cache.misses().get("expired", 0)
        time.sleep(TTL_S + 0.05)
        assert retrieve(cache) == 0
        assert cache.misses() == {"expired": before + NUM_CHUNKS}
        assert cache.engine.lookup(TOKENS) == 0
        cache.check_nothing_held()
        store(cache, TOKENS[:CHUNK_SIZE])
        assert retrieve(cache, TOKENS[:CHUNK_SIZE]) == 1 or time.monotonic() - stored > TTL_S, (
            "what expired may be stored again"
        )


async def test_expired_through_the_stack_is_told_by_the_clock() -> None:
    now, arena = [1000.0], ArenaAllocator.anonymous(1 << 16)
    hot = LocalCPUBackend(
        arena, create_policy(), limits=TierLimits(ttl_s=10.0), clock=lambda: now[0]
    )
    stack = TierStack(hot)
    await stack.open()
    assert await stack.batched_put([make_chunk("a")]) == [True]
    now[0] += 9.0
    (result,) = await stack.batched_get([make_key("a")])
    assert isinstance(result, Chunk)
    result.release()
    now[0] += 2.0
    assert await stack.batched_get([make_key("a"), make_key("b")]) == [
        Miss(MissReason.EXPIRED),
        Miss(MissReason.NEVER_STORED),
    ]
    await stack.close()
    assert arena.used_bytes == 0
