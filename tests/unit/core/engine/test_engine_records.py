"""Records that are whole, have the right key, and are still not the raw KV that the serving
engine wants: misses.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import Chunk, RecordHeader, TensorSpec, encode_head, payload_digest
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, RETRIEVED_CHUNKS_TOTAL
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.fixtures.kv import (
    CHUNK_SIZE,
    HIDDEN,
    NUM_LAYERS,
    empty_kv,
    make_config,
    make_metadata,
    random_kv,
    tokens_of,
)

SHAPE = (2, NUM_LAYERS, CHUNK_SIZE, HIDDEN)
NUM_BYTES = 2 * NUM_LAYERS * CHUNK_SIZE * HIDDEN * 4
TOKENS = tokens_of(2 * CHUNK_SIZE)


@pytest.fixture
def engine() -> Iterator[LMCacheEngine]:
    config, metadata = make_config(), make_metadata()
    allocator = HostMemoryAllocator(1 << 20)
    database = ChunkedTokenDatabase(config, metadata)
    made = LMCacheEngine(
        config, metadata, allocator, database, VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    )
    made.open()
    yield made
    made.close()
    allocator.check_integrity()
    assert allocator.used_bytes == 0


def put(
    engine: LMCacheEngine,
    key: CacheEngineKey,
    fields: dict[str, object],
    spec: TensorSpec,
    num_bytes: int,
) -> None:
    store = engine._store
    (memory,) = store.reserve([key], [(num_bytes,)], "uint8")
    assert not isinstance(memory, NotLent)
    memory.byte_array[:] = bytes(num_bytes)
    given = {"serde": "naive", "profile": "", "lossy": False, "tensors": (spec,)} | fields
    header = RecordHeader(key=key.canonical(), digest=payload_digest(memory.byte_array), **given)  # type: ignore[arg-type]
    chunk = Chunk(
        ChunkKey.of(DEFAULT_TENANT, key), header, encode_head(header, num_bytes), memory, "memory"
    )
    assert store.put([chunk]) == [True]
    store.release([chunk])


@pytest.mark.parametrize(
    ("fields", "spec", "num_bytes"),
    [
        pytest.param(
            {"serde": "other"},
            TensorSpec("", "float32", SHAPE, 0, NUM_BYTES),
            NUM_BYTES,
            id="encoded",
        ),
        pytest.param(
            {"serde": "other"}, TensorSpec("", "float32", SHAPE, 0, 100), 100, id="compressed"
        ),
        pytest.param(
            {}, TensorSpec("", "float32", SHAPE, 512, NUM_BYTES), 512 + NUM_BYTES, id="offset"
        ),
        pytest.param({}, TensorSpec("", "int32", SHAPE, 0, NUM_BYTES), NUM_BYTES, id="dtype"),
        pytest.param(
            {}, TensorSpec("", "float32", SHAPE[::-1], 0, NUM_BYTES), NUM_BYTES, id="shape"
        ),
        pytest.param({"tensors": ()}, TensorSpec("", "float32", SHAPE, 0, 0), 0, id="empty"),
    ],
)
def test_other_encodings_are_a_miss_with_a_reason(
    engine: LMCacheEngine, fields: dict[str, object], spec: TensorSpec, num_bytes: int
) -> None:
    keys = [key for _, _, key in engine._token_database.process_tokens(TOKENS)]
    put(engine, keys[0], fields, spec, num_bytes)
    engine.store(TOKENS, kvcaches=random_kv(len(TOKENS)))
    target = empty_kv(len(TOKENS))
    assert not engine.retrieve(TOKENS, kvcaches=target).any()
    assert all(torch.isnan(side).all() for layer in target for side in layer), (
        "serving engine memory is untouched"
    )
    assert engine.counters.value(MISSED_CHUNKS_TOTAL, "layout") == 2
    assert engine.counters.value(RETRIEVED_CHUNKS_TOTAL) == 0


def test_what_was_decoded_from_a_lossy_record_is_taken(engine: LMCacheEngine) -> None:
    """The tier that it came from has decided that already: here it is raw KV like any."""
    keys = [key for _, _, key in engine._token_database.process_tokens(TOKENS)]
    for key in keys:
        put(
            engine,
            key,
            {"lossy": True, "profile": "low@0123"},
            TensorSpec("", "float32", SHAPE, 0, NUM_BYTES),
            NUM_BYTES,
        )
    target = empty_kv(len(TOKENS))
    assert engine.retrieve(TOKENS, kvcaches=target).all()
    assert all((side == 0).all() for layer in target for side in layer)
