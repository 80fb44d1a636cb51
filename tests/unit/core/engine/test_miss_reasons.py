"""Why a chunk was not served, as the engine counts it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import Chunk, RecordHeader, TensorSpec, encode_head, payload_digest
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, RETRIEVED_CHUNKS_TOTAL

from tests.fixtures.embedded import PATIENT, Embedded, build_engine, embedded_engine, until
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, assert_equal_prefix, empty_kv
from tests.fixtures.prompts import CHUNK_BYTES, kv_of, tokens_of

patient_engine = functools.partial(embedded_engine, **PATIENT)
TOKENS = tokens_of((0, 1, 0, 0))
NUM_CHUNKS = 4
SHAPE = (2, NUM_LAYERS, CHUNK_SIZE, HIDDEN)


@pytest.mark.parametrize("has_disk", [False, True])
def test_never_stored(tmp_path: Path, has_disk: bool) -> None:
    with patient_engine(tmp_path if has_disk else None) as cache:
        cache.store(TOKENS[: 2 * CHUNK_SIZE])
        assert cache.retrieve(TOKENS) == 2 * CHUNK_SIZE
        assert cache.misses() == {"never_stored": 2}
        assert cache.engine.counters.value(RETRIEVED_CHUNKS_TOTAL, "memory") == 2


def test_chunks_after_the_first_miss_are_missed_with_it_and_masked_ones_are_not() -> None:
    with patient_engine() as cache:
        mask = torch.arange(len(TOKENS)) >= CHUNK_SIZE
        assert not cache.engine.retrieve(TOKENS, mask, kvcaches=empty_kv(len(TOKENS))).any()
        assert cache.misses() == {"never_stored": NUM_CHUNKS - 1}


def put(cache: Embedded, key: CacheEngineKey, serde: str, spec: TensorSpec, **more: object) -> None:
    """Put a whole record of that key into memory, of zeros."""
    num_bytes = spec.offset + spec.length
    (memory,) = cache.manager.reserve([key], [(num_bytes,)], "uint8")
    assert not isinstance(memory, NotLent)
    memory.byte_array[:] = bytes(num_bytes)
    fields = {"profile": "", "lossy": False, "tensors": (spec,)} | more
    header = RecordHeader(
        key=key.canonical(), serde=serde, digest=payload_digest(memory.byte_array), **fields
    )  # type: ignore[arg-type]
    chunk = Chunk(
        ChunkKey.of(DEFAULT_TENANT, key), header, encode_head(header, num_bytes), memory, "memory"
    )
    assert cache.manager.put([chunk]) == [True]
    cache.manager.release([chunk])


@pytest.mark.parametrize(
    ("serde", "spec"),
    [
        pytest.param("other", TensorSpec("", "float32", SHAPE, 0, 100), id="encoded"),
        pytest.param("naive", TensorSpec("", "float32", SHAPE, 512, CHUNK_BYTES), id="offset"),
        pytest.param("naive", TensorSpec("", "int32", SHAPE, 0, CHUNK_BYTES), id="dtype"),
        pytest.param("naive", TensorSpec("", "float32", SHAPE[::-1], 0, CHUNK_BYTES), id="shape"),
    ],
)
def test_layout(serde: str, spec: TensorSpec) -> None:
    """A record that is whole and has the right key, but is not the raw KV that is wanted."""
    with patient_engine() as cache:
        put(cache, cache.keys(TOKENS)[1], serde, spec)
        cache.store(TOKENS)
        target = empty_kv(len(TOKENS))
        assert int(cache.engine.retrieve(TOKENS, kvcaches=target).sum()) == CHUNK_SIZE
        assert_equal_prefix(target, kv_of(TOKENS), CHUNK_SIZE)
        assert cache.misses() == {"layout": NUM_CHUNKS - 1}
        cache.check_nothing_held()


@pytest.mark.parametrize("has_disk", [False, True])
def test_corrupt_in_memory(tmp_path: Path, has_disk: bool) -> None:
    with patient_engine(tmp_path if has_disk else None, verify_hot="always") as cache:
        cache.store(TOKENS)
        if has_disk:
            cache.drain()
        chunks = cache.manager.get(cache.keys(TOKENS))
        chunks[1].memory.byte_array[100] ^= 0x01
        cache.manager.release(chunks)
        assert cache.retrieve(TOKENS, num_spoiled=CHUNK_SIZE) == CHUNK_SIZE
        assert cache.misses() == {"corrupt": NUM_CHUNKS - 1}
        cache.check_nothing_held()
        assert cache.retrieve(TOKENS) == (len(TOKENS) if has_disk else CHUNK_SIZE), (
            "the disk's copy is sound"
        )


@pytest.mark.parametrize("is_opened_first", [True, False])
def test_unavailable_when_not_open(tmp_path: Path, is_opened_first: bool) -> None:
    """An engine that is not open is an empty cache."""
    engine = build_engine(HostMemoryAllocator(NUM_CHUNKS * CHUNK_BYTES), tmp_path)
    if is_opened_first:
        engine.open()
        engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        engine.close()
        engine.close()
    engine.store(TOKENS, kvcaches=kv_of(TOKENS))
    engine.prefetch(TOKENS)
    assert engine.lookup(TOKENS) == 0
    assert not engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
    assert engine.counters.value(MISSED_CHUNKS_TOTAL, "unavailable") == NUM_CHUNKS
    assert engine.stats() == {}
    engine.close()


def test_no_memory(tmp_path: Path) -> None:
    with patient_engine(tmp_path, num_chunks=6) as cache:
        for num in range(1, NUM_CHUNKS + 1):  # all together are more than may wait to be written
            cache.store(TOKENS[: num * CHUNK_SIZE])
            cache.drain()
        cache.forget_hot()
        taken = cache.manager.reserve(cache.keys(TOKENS)[:4], [SHAPE] * 4, "float32")
        assert cache.retrieve(TOKENS) == 2 * CHUNK_SIZE
        assert cache.misses() == {"no_memory": NUM_CHUNKS - 2}
        cache.manager.abort([memory for memory in taken if not isinstance(memory, NotLent)])
        assert cache.retrieve(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("has_disk", [False, True])
def test_expired(tmp_path: Path, has_disk: bool) -> None:
    with patient_engine(tmp_path if has_disk else None, chunk_ttl_s=0.001) as cache:
        cache.store(TOKENS)
        until(lambda: cache.engine.lookup(TOKENS) == 0)
        assert cache.retrieve(TOKENS) == 0
        assert cache.misses() == {"expired": NUM_CHUNKS}
        assert cache.engine.lookup(TOKENS) == 0
        cache.check_nothing_held()
