"""The engine with other parts than those of its builder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.errors import ConfigError
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import (
    ChunkedTokenDatabase,
    MultimodalSpan,
    RadixTokenDatabase,
    TokenDatabase,
)

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

NUM_TOKENS = 3 * CHUNK_SIZE + 5


class WholeSequences(TokenDatabase):
    """Has only the documented method: no spans, no salt, and chunks of another kind."""

    def process_tokens(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        if len(tokens):
            yield (
                0,
                len(tokens),
                CacheEngineKey(
                    "vllm", "m", 1, 0, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
                ),
            )


def build(database: TokenDatabase, **options: object) -> LMCacheEngine:
    allocator = HostMemoryAllocator(8 << 20)
    return LMCacheEngine(
        make_config(**options),
        make_metadata(),
        allocator,
        database,
        VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS),
    )


@pytest.mark.parametrize(
    "database",
    [WholeSequences(), RadixTokenDatabase(make_config(), make_metadata())],
    ids=["documented", "radix"],
)
def test_an_engine_serves_with_any_token_database(database: TokenDatabase) -> None:
    engine = build(database)
    engine.open()
    tokens, kv, target = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS), empty_kv(NUM_TOKENS)
    engine.store(tokens, kvcaches=kv)
    engine.prefetch(tokens)
    assert engine.lookup(tokens) == NUM_TOKENS
    assert engine.retrieve(tokens, kvcaches=target).all()
    assert_equal_prefix(target, kv, NUM_TOKENS)
    engine.close()


def test_a_database_without_salt_is_refused_where_there_is_one() -> None:
    engine = build(WholeSequences(), salt="tenant-a")
    with pytest.raises(ConfigError, match="WholeSequences"):
        engine.open()
    engine.close()


def test_a_database_without_spans_refuses_images() -> None:
    engine = build(WholeSequences(), error_handling=False)
    engine.open()
    with pytest.raises(TypeError):
        engine.lookup(tokens_of(NUM_TOKENS), spans=[MultimodalSpan(b"cat", 0, 4)])
    engine.close()


def test_an_engine_without_a_sidecar_needs_an_allocator() -> None:
    config, metadata = make_config(), make_metadata()
    database, connector = ChunkedTokenDatabase(config, metadata), VLLMNestedTupleGPUConnector(1, 1)
    with pytest.raises(ConfigError, match="memory_allocator"):
        LMCacheEngine(config, metadata, None, database, connector)
