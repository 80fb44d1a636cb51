"""What naming tokens costs: hashes, keys, a known prefix, and a lookup of a long prompt that is all
in memory.

Everything is held against one hashlib call over the same tokens as uint32, done in turn with each
round; the lookup against the hashes of its own prompt.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import (
    ChunkedTokenDatabase,
    RadixTokenDatabase,
    TokenDatabase,
    chain_hashes,
)
from lmcache_core.token_database.hashing import tokens_as_uint32

from tests.bench.measure import in_turn, timed
from tests.bench.shape import CHUNK_SIZE, make_config

NUM_TOKENS = 1_000_000
NUM_LOOKUP_TOKENS = 100_000
VOCABULARY_SIZE = 128_256
NUM_ROUNDS = 41
"""A round takes milliseconds, so there can be more of them than where gigabytes are moved."""
LOOKUP_ARENA_BYTES = 32 << 20
METADATA = LMCacheEngineMetadata(
    "bench/identity", 1, 0, "vllm", torch.bfloat16, (1, 2, CHUNK_SIZE, 1, 8)
)
"""KV so small that 100,000 tokens of it fit in memory; a lookup does not look at it."""


@dataclass(frozen=True)
class NamingCost:
    """One row: how long it took, and how many times what it is held against.

    Attributes:
        name: What was measured.
        seconds: Each round.
        beside: Seconds of the limit's work, done in turn with each round; empty for a limit itself.
        goal: At most so many times the limit, None where there is no goal.
        note: What it is held against, or what limits it.
    """

    name: str
    seconds: tuple[float, ...]
    beside: tuple[float, ...] = ()
    goal: float | None = None
    note: str = ""

    @property
    def elapsed_ms(self) -> float:
        """Median, milliseconds."""
        return statistics.median(self.seconds) * 1e3

    @property
    def spread_ms(self) -> tuple[float, float]:
        """Fastest and slowest round, milliseconds."""
        return min(self.seconds) * 1e3, max(self.seconds) * 1e3

    @property
    def times(self) -> float | None:
        """How many times the limit: the median over rounds measured in turn. None for a limit
        itself.
        """
        return (
            statistics.median(
                mine / limit for mine, limit in zip(self.seconds, self.beside, strict=True)
            )
            if self.beside
            else None
        )


def identity_rows() -> list[NamingCost]:
    """Hashes, keys and lookups; takes about three seconds."""
    return [
        *naming_rows(),
        lookup_row("chunked", ChunkedTokenDatabase),
        lookup_row("radix", RadixTokenDatabase),
    ]


def naming_rows() -> list[NamingCost]:
    """A million tokens, as the int64 tensor that engines have: their hashes, their keys, and
    their keys when they are known.
    """
    tokens = prompt(NUM_TOKENS)
    raw = tokens_as_uint32(tokens).tobytes()
    chunked, radix = (
        ChunkedTokenDatabase(make_config(), METADATA),
        RadixTokenDatabase(make_config(), METADATA),
    )
    if list(radix.process_tokens(tokens)) != list(chunked.process_tokens(tokens)):
        raise AssertionError("the two databases name chunks differently")

    def limit(_: int) -> None:
        hashlib.sha256(raw).digest()

    def row(name: str, goal: float | None, note: str, work: Callable[[int], object]) -> NamingCost:
        return NamingCost(
            f"{name}, {NUM_TOKENS:,} tokens", *in_turn(work, limit, rounds=NUM_ROUNDS), goal, note
        )

    return [
        NamingCost(f"SHA-256 of {len(raw):,} bytes in one call", timed(limit, rounds=NUM_ROUNDS)),
        row(
            "chunk hashes",
            3.5,
            "a chain: a message of its own for each chunk",
            lambda _: hash_only(tokens),
        ),
        row(
            "process_tokens, chunked",
            6.0,
            "besides, a key for each chunk",
            lambda _: list(chunked.process_tokens(tokens)),
        ),
        row(
            "process_tokens, radix, known",
            None,
            "tokens compared, none hashed",
            lambda _: list(radix.process_tokens(tokens)),
        ),
    ]


def lookup_row(
    name: str, make: Callable[[LMCacheEngineConfig, LMCacheEngineMetadata], TokenDatabase]
) -> NamingCost:
    """`LMCacheEngine.lookup` of a long prompt that is all in the memory tier, against the chunk
    hashes of the same tokens.
    """
    tokens = prompt(NUM_LOOKUP_TOKENS)
    with stored(tokens, make) as engine:
        timings = in_turn(
            lambda _: engine.lookup(tokens), lambda _: hash_only(tokens), rounds=NUM_ROUNDS
        )
    return NamingCost(
        f"lookup, {name}, {NUM_LOOKUP_TOKENS:,} tokens in memory",
        *timings,
        2.0,
        "against the chunk hashes of its tokens",
    )


@contextmanager
def stored(
    tokens: torch.Tensor,
    make: Callable[[LMCacheEngineConfig, LMCacheEngineMetadata], TokenDatabase],
) -> Iterator[LMCacheEngine]:
    """An embedded engine that has the KV of these tokens in memory."""
    config = make_config()
    connector = VLLMNestedTupleGPUConnector(8, 1)
    engine = LMCacheEngine(
        config, METADATA, HostMemoryAllocator(LOOKUP_ARENA_BYTES), make(config, METADATA), connector
    )
    engine.open()
    try:
        engine.store(tokens, kvcaches=[(torch.zeros(len(tokens), 1, 8, dtype=torch.bfloat16),) * 2])
        if engine.lookup(tokens) != len(tokens):
            raise AssertionError("the prompt is not in memory")
        yield engine
    finally:
        engine.close()


def prompt(num_tokens: int) -> torch.Tensor:
    """Token ids, shape `[num_tokens]`, int64, the same every time."""
    return torch.randint(
        0, VOCABULARY_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)
    )


def hash_only(tokens: torch.Tensor) -> None:
    """The chunk hashes, made and dropped."""
    deque(chain_hashes(bytes(32), tokens_as_uint32(tokens), CHUNK_SIZE), maxlen=0)
