"""The KV that is moved: 4,096 tokens of a Llama-3.1-8B-shaped model, 512 MiB."""

from __future__ import annotations

import torch
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata

NUM_TOKENS, CHUNK_SIZE = 4096, 256
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 32, 8, 128
HIDDEN = NUM_HEADS * HEAD_SIZE
DTYPE = torch.bfloat16
TOTAL_BYTES = 2 * NUM_LAYERS * NUM_TOKENS * HIDDEN * 2
CHUNK_BYTES = TOTAL_BYTES * CHUNK_SIZE // NUM_TOKENS
NUM_CHUNKS = NUM_TOKENS // CHUNK_SIZE

KVCaches = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def make_kv(fill: int | None = None) -> KVCaches:
    """Per layer K and V, `[4096, 8, 128]` bf16, touched. Random bits, or all bytes `fill`."""
    generator = torch.Generator().manual_seed(0)

    def side() -> torch.Tensor:
        shape = (NUM_TOKENS, NUM_HEADS, HEAD_SIZE * 2)
        raw = torch.empty(shape, dtype=torch.uint8)
        if fill is None:
            raw.random_(generator=generator)
        else:
            raw.fill_(fill)
        return raw.view(DTYPE)

    return tuple((side(), side()) for _ in range(NUM_LAYERS))


def tokens_of(turn: int) -> torch.Tensor:
    """A prompt that no other round has."""
    return torch.arange(NUM_TOKENS) + turn * NUM_TOKENS


def make_metadata() -> LMCacheEngineMetadata:
    """Identity of that KV."""
    return LMCacheEngineMetadata(
        "bench/llama-3.1-8b-shape",
        1,
        0,
        "vllm",
        DTYPE,
        (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE),
    )


def make_config(**options: object) -> LMCacheEngineConfig:
    """An engine without remote tier, room for two prompts."""
    values: dict[str, object] = {
        "remote_url": None,
        "max_local_cpu_size": 1.25,
        "tier_timeout_s": 60.0,
    }
    return LMCacheEngineConfig.from_defaults(**(values | options))


def same_bits(a: KVCaches, b: KVCaches) -> bool:
    """Whether two KV are equal bit for bit."""
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for pair_a, pair_b in zip(a, b, strict=True)
        for x, y in zip(pair_a, pair_b, strict=True)
    )
