"""The engine with tiers of its own, and with other parts than those of its builder."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_core.errors import ConfigError
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL, STORED_BYTES_TOTAL, STORED_CHUNKS_TOTAL
from lmcache_core.token_database import (
    ChunkedTokenDatabase,
    MultimodalSpan,
    RadixTokenDatabase,
    TokenDatabase,
)

from tests.fixtures.embedded import PATIENT, build_engine, embedded_engine, until
from tests.fixtures.kv import (
    CHUNK_SIZE,
    HIDDEN,
    NUM_LAYERS,
    assert_equal_prefix,
    empty_kv,
    make_config,
    make_metadata,
    random_kv,
    tokens_of,
)
from tests.fixtures.prompts import CHUNK_BYTES, kv_of
from tests.fixtures.prompts import tokens_of as prompt


@pytest.fixture
def allocator() -> Iterator[HostMemoryAllocator]:
    made = HostMemoryAllocator(8 << 20)
    yield made
    made.check_integrity()
    assert made.used_bytes == 0


@pytest.mark.parametrize("num_tokens", [1, CHUNK_SIZE, 2 * CHUNK_SIZE + 3])
@pytest.mark.parametrize("save_unfull_chunk", [True, False])
def test_a_partial_chunk_is_stored_only_if_configured(
    allocator: HostMemoryAllocator, save_unfull_chunk: bool, num_tokens: int
) -> None:
    tokens, kv, target = tokens_of(num_tokens), random_kv(num_tokens), empty_kv(num_tokens)
    num_kept = num_tokens if save_unfull_chunk else num_tokens // CHUNK_SIZE * CHUNK_SIZE
    with build_engine(allocator, save_unfull_chunk=save_unfull_chunk) as engine:
        for _ in range(2):
            engine.store(tokens, kvcaches=kv)
            assert engine.counters.value(STORED_CHUNKS_TOTAL) == math.ceil(num_kept / CHUNK_SIZE)
            assert engine.lookup(tokens) == num_kept
        num_bytes = num_kept * CHUNK_BYTES // CHUNK_SIZE
        assert engine.counters.value(STORED_BYTES_TOTAL) == num_bytes
        assert int(engine.retrieve(tokens, kvcaches=target).sum()) == num_kept
        assert_equal_prefix(target, kv, num_kept)


@pytest.mark.parametrize(
    ("name", "is_another"), [(b"kv", True), (b"kv \xff", True), (b"kv", False)]
)
def test_disk_serves_after_a_restart(
    allocator: HostMemoryAllocator, tmp_path: Path, name: bytes, is_another: bool
) -> None:
    """An engine may also be closed and opened again."""
    directory = tmp_path / os.fsdecode(name)
    tokens, kv = tokens_of(4 * CHUNK_SIZE + 5), random_kv(4 * CHUNK_SIZE + 5)
    first = build_engine(allocator, directory, **PATIENT)
    with first:
        first.store(tokens, kvcaches=kv)
    with build_engine(allocator, directory, **PATIENT) if is_another else first as second:
        assert second.lookup(tokens, ["Hot"]) == 0
        assert second.lookup(tokens, ["LocalDiskBackend"]) == len(tokens)
        target = empty_kv(len(tokens))
        assert second.retrieve(tokens, kvcaches=target).all()
        assert_equal_prefix(target, kv, len(tokens))
        assert second.counters.value(RETRIEVED_TOKENS_TOTAL, "disk") == len(tokens)
        assert second.lookup(tokens, ["Hot"]) == len(tokens), "what came from disk is hot now"
    assert os.listdir(os.fsencode(tmp_path)) == [name]  # noqa: PTH208 -- pathlib has no names in bytes


def test_a_lookup_joins_what_each_tier_has(tmp_path: Path) -> None:
    """Memory has the second and third chunk, the disk the first, a remote the fourth."""
    remote = tmp_path / "remote"
    remote.mkdir()
    tokens = tokens_of(4 * CHUNK_SIZE)
    with embedded_engine(tmp_path / "kv", remote_url=f"file://{remote}", **PATIENT) as cache:
        cache.engine.store(tokens, kvcaches=random_kv(len(tokens)))
        keys = [ChunkKey.of(DEFAULT_TENANT, key) for key in cache.keys(tokens)]
        places = {"memory": [1, 2], "disk": [0], "storage": [3]}
        for tier in (cache.hot, *cache.stack.lower):
            until(lambda name=tier.name: cache.engine.lookup(tokens, [name]) == len(tokens))
            others = [key for i, key in enumerate(keys) if i not in places[tier.name]]
            cache.run(tier.batched_remove(others))
        assert cache.engine.lookup(tokens) == len(tokens)
        assert cache.engine.lookup(tokens, ["Hot", "LocalDiskBackend"]) == 3 * CHUNK_SIZE
        assert cache.engine.lookup(tokens, ["LocalDiskBackend"]) == CHUNK_SIZE
        assert cache.engine.lookup(tokens, ["RemoteBackend"]) == 0, "the first chunk is elsewhere"
        assert cache.engine.lookup(tokens, ["peers", "P2PBackend"]) == 0
        assert cache.engine.lookup(tokens, []) == 0


@pytest.fixture
def arguments() -> Iterator[tuple[LMCacheEngineConfig, object, object]]:
    """Of an engine that the builder makes; `one` is forgotten again."""
    yield make_config(), make_metadata(), VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    LMCacheEngineBuilder.destroy("one")


def test_the_builder_keeps_one_engine_for_an_id(arguments) -> None:
    first = LMCacheEngineBuilder.get_or_create("one", *arguments)
    assert LMCacheEngineBuilder.get_or_create("one", *arguments) is first
    assert LMCacheEngineBuilder.get("one") is first
    with pytest.raises(ValueError, match="another configuration"):
        LMCacheEngineBuilder.get_or_create("one", make_config(chunk_size=32), *arguments[1:])
    LMCacheEngineBuilder.destroy("one")
    assert LMCacheEngineBuilder.get("one") is None
    LMCacheEngineBuilder.destroy("one")


def test_leaving_the_block_closes_an_engine_and_frees_its_id(arguments) -> None:
    tokens, kv = tokens_of(32), random_kv(32)
    with LMCacheEngineBuilder.get_or_create("one", *arguments) as first:
        first.store(tokens, kvcaches=kv)
        assert first.lookup(tokens) == 32
    assert first.lookup(tokens) == 0
    assert LMCacheEngineBuilder.get("one") is None
    with LMCacheEngineBuilder.get_or_create("one", *arguments) as second:
        assert second is not first
        first.close()
        assert LMCacheEngineBuilder.get("one") is second, "an engine frees only its own id"


def test_equal_placeholders_of_other_images_share_nothing(allocator: HostMemoryAllocator) -> None:
    """Turn 1 has an image in chunk 1; the same tokens with another image share chunk 0 alone, a
    new image in turn 2 keeps turn 1.
    """
    n = 4 * CHUNK_SIZE
    tokens, kv = tokens_of(n), random_kv(n)
    cat, dog = (MultimodalSpan(name, CHUNK_SIZE + 2, 5) for name in (b"cat", b"dog"))
    with build_engine(allocator) as engine:
        engine.store(tokens, spans=[cat], kvcaches=kv)
        assert engine.lookup(tokens, spans=[cat]) == n
        assert engine.lookup(tokens, spans=[dog]) == engine.lookup(tokens) == CHUNK_SIZE
        target = empty_kv(n)
        assert int(engine.retrieve(tokens, spans=[dog], kvcaches=target).sum()) == CHUNK_SIZE
        assert_equal_prefix(target, kv, CHUNK_SIZE)
        later = MultimodalSpan(b"bird", 3 * CHUNK_SIZE, 4)
        assert engine.lookup(tokens, spans=[cat, later]) == 3 * CHUNK_SIZE


TOKENS = prompt((0, 1, 2), last=5)


class WholeSequences(TokenDatabase):
    """Has only the documented method: no spans, no salt, and chunks of another kind."""

    def process_tokens(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        if len(tokens):
            digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
            yield 0, len(tokens), CacheEngineKey("vllm", "m", 1, 0, digest)


@pytest.mark.parametrize(
    "database",
    [WholeSequences(), RadixTokenDatabase(make_config(), make_metadata())],
    ids=["documented", "radix"],
)
def test_an_engine_serves_with_any_token_database(database: TokenDatabase) -> None:
    target = empty_kv(len(TOKENS))
    with embedded_engine(database=database) as cache:
        cache.engine.store(TOKENS, kvcaches=kv_of(TOKENS))
        cache.engine.prefetch(TOKENS)
        assert cache.engine.lookup(TOKENS) == len(TOKENS)
        assert cache.engine.retrieve(TOKENS, kvcaches=target).all()
        assert_equal_prefix(target, kv_of(TOKENS), len(TOKENS))


def test_a_database_without_salt_is_refused_where_there_is_one() -> None:
    allocator = HostMemoryAllocator(1 << 16)
    with build_engine(allocator, database=WholeSequences()) as engine:
        assert engine.lookup(TOKENS) == 0
    with pytest.raises(ConfigError, match="WholeSequences"):
        build_engine(allocator, database=WholeSequences(), salt="tenant-a").open()


def test_an_engine_without_a_sidecar_needs_an_allocator() -> None:
    config, metadata = make_config(), make_metadata()
    database, connector = ChunkedTokenDatabase(config, metadata), VLLMNestedTupleGPUConnector(1, 1)
    with pytest.raises(ConfigError, match="memory_allocator"):
        LMCacheEngine(config, metadata, None, database, connector)
