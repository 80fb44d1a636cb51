"""What a lookup against the hot tier costs beside the hashing of its prompt."""

from __future__ import annotations

import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase, chain_hashes, identity_root
from lmcache_core.token_database.hashing import tokens_as_uint32

from tests.bench.measure import Latency, in_turn
from tests.bench.shape import CHUNK_SIZE, make_config, make_metadata

NUM_PROMPT_TOKENS = 100_000
HIDDEN, NUM_LAYERS = 8, 1
ROUNDS = 101


def lookup_latency() -> Latency:
    """A prompt of 100,000 tokens, every chunk hot, KV as small as can be: only the lookup is measured."""
    config, metadata = make_config(max_local_cpu_size=0.1), make_metadata()
    allocator = HostMemoryAllocator(1 << 26)
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    engine = LMCacheEngine(config, metadata, allocator, ChunkedTokenDatabase(config, metadata), connector)
    engine.open()
    try:
        tokens = torch.arange(NUM_PROMPT_TOKENS)
        side = torch.zeros(NUM_PROMPT_TOKENS, 1, HIDDEN, dtype=torch.bfloat16)
        engine.store(tokens, kvcaches=((side, side),))
        root = identity_root(metadata)

        def look(turn: int) -> None:
            if engine.lookup(tokens) != NUM_PROMPT_TOKENS:
                raise AssertionError("the prompt is not hot")

        seconds, hashing = in_turn(look, lambda turn: list(chain_hashes(root, tokens_as_uint32(tokens), CHUNK_SIZE)), rounds=ROUNDS)
    finally:
        engine.close()
    return Latency("lookup of 100,000 tokens, all hot", seconds, hashing, "its hashing alone")
