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
from lmcache_core.token_database import ChunkedTokenDatabase, RadixTokenDatabase, TokenDatabase

from tests.fixtures.embedded import build_engine, embedded_engine
from tests.fixtures.kv import assert_equal_prefix, empty_kv, make_config, make_metadata
from tests.fixtures.prompts import kv_of, tokens_of

TOKENS = tokens_of((0, 1, 2), last=5)


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
