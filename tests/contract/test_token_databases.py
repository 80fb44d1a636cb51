"""The contract suite over every token database, and the golden vectors through each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, RadixTokenDatabase

from tests.suites.token_database_suite import (
    CHUNK_SIZE,
    MakeDatabase,
    TokenDatabaseSuite,
    make_config,
)

CHAINS = json.loads(
    (Path(__file__).parent / "golden" / "identity.json").read_text(encoding="utf-8")
)["chains"]
SMALL_BOUND_TOKENS = 5 * CHUNK_SIZE


class _GoldenSuite(TokenDatabaseSuite):
    @pytest.mark.parametrize("case", CHAINS, ids=[case["name"] for case in CHAINS])
    @pytest.mark.parametrize("num_known", [0, 1, 5, None])
    def test_golden_vectors(
        self, make_database: MakeDatabase, case: dict[str, Any], num_known: int | None
    ) -> None:
        metadata = LMCacheEngineMetadata(
            **{**case["metadata"], "kv_shape": tuple(case["metadata"]["kv_shape"])}
        )
        database = make_database(make_config(case["salt"], case["chunk_size"]), metadata)
        spans = [
            MultimodalSpan(bytes.fromhex(content), offset, length)
            for content, offset, length in case["spans"]
        ]
        tokens = torch.tensor(case["tokens"], dtype=torch.int64)
        list(database.process_tokens(tokens[:num_known], None, spans))
        got = [
            [start, end, key.chunk_hash]
            for start, end, key in database.process_tokens(tokens, None, spans)
        ]
        assert got == case["chunks"]


class TestChunked(_GoldenSuite):
    @pytest.fixture
    def make_database(self) -> MakeDatabase:
        return ChunkedTokenDatabase


class TestRadix(_GoldenSuite):
    @pytest.fixture
    def make_database(self) -> MakeDatabase:
        return RadixTokenDatabase


class TestRadixWithEvictions(_GoldenSuite):
    """A bound so small that most of what is known is forgotten again at once."""

    @pytest.fixture
    def make_database(self) -> MakeDatabase:
        return lambda config, metadata: RadixTokenDatabase(
            config, metadata, max_tokens=SMALL_BOUND_TOKENS
        )
