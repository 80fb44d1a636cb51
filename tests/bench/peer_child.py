"""An engine, ours or LMCache's, driven over stdin and stdout by JSON, one object a line.

Both run the same prompts, copy the same tensors and are timed by the same lines of this file, each
in its own process. It imports nothing from this repository except what `ours` needs.

With `--small`, chunks are of 1 KiB, in prompts of 16: what a chunk costs apart from its bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

NUM_TOKENS, CHUNK_SIZE = 4096, 256
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 32, 8, 128
HIDDEN = NUM_HEADS * HEAD_SIZE
DTYPE = torch.bfloat16
KV_SHAPE = (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE)
MODEL = "bench/llama-3.1-8b-shape"
VISIBLE_TIMEOUT_S = 120.0
SMALL: dict[str, Any] = {
    "NUM_TOKENS": 256,
    "CHUNK_SIZE": 16,
    "NUM_LAYERS": 1,
    "NUM_HEADS": 1,
    "HEAD_SIZE": 16,
    "HIDDEN": 16,
    "KV_SHAPE": (1, 2, 16, 1, 16),
}
PROMPTS_AT_ONCE = 50


def ours(options: dict[str, Any]) -> Any:
    """Return our engine, and a function that makes the arguments of its calls from KV."""
    from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
    from lmcache_core.engine import LMCacheEngineBuilder
    from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_SIZE,
        tier_timeout_s=60.0,
        prefill_tokens_per_s=1.0,  # otherwise a slow tier would be declined and not measured
        **options,
    )
    metadata = LMCacheEngineMetadata(MODEL, 1, 0, "vllm", DTYPE, KV_SHAPE)
    connector = VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS)
    engine = LMCacheEngineBuilder.get_or_create("bench", config, metadata, connector)

    def arguments(kv: torch.Tensor) -> dict[str, Any]:
        halves = kv.unflatten(-1, (NUM_HEADS, HEAD_SIZE))
        return {"kvcaches": tuple((halves[0, i], halves[1, i]) for i in range(NUM_LAYERS))}

    return engine, arguments


def lmcache(options: dict[str, Any]) -> Any:
    """Return the same for LMCache. Its own connectors need CUDA, so this one copies slices of one
    tensor.
    """
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.metadata import LMCacheMetadata

    class Slices(GPUConnectorInterface):
        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            kwargs["kv"][:, :, start:end] = memory_obj.tensor

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

        def batched_to_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

        def batched_from_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([2, NUM_LAYERS, num_tokens, HIDDEN])

        def initialize_kvcaches_ptr(self, **_: Any) -> None:
            pass

    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK_SIZE, **options)
    metadata = LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=DTYPE,
        kv_shape=KV_SHAPE,
        chunk_size=CHUNK_SIZE,
        role="worker",
        engine_id="bench",
    )
    engine = LMCacheEngineBuilder.get_or_create(
        "bench", config, metadata, Slices(), lambda tensor, _: tensor, lambda item, _: item
    )
    engine.post_init()
    return engine, lambda kv: {"kv": kv}


class Driver:
    """Times the calls of one engine."""

    def __init__(self, engine: Any, arguments: Any, tier: str) -> None:
        self._engine = engine
        self._arguments = arguments
        self._tier = tier
        bits = torch.empty((2, NUM_LAYERS, NUM_TOKENS, 2 * HIDDEN), dtype=torch.uint8)
        self._source = bits.random_(generator=torch.Generator().manual_seed(0)).view(DTYPE)
        self._target = torch.zeros_like(self._source)

    def store(self, turn: int) -> dict[str, float]:
        """Store a prompt; return the seconds until the tier has all of it."""
        # One value differs, so that a prompt of another turn would be detected.
        self._source[0, 0, :, 0] = float(turn + 1)
        tokens = _tokens(turn)
        began = time.perf_counter()
        self._engine.store(tokens, **self._arguments(self._source))
        while self._engine.lookup(tokens, search_range=[self._tier]) < NUM_TOKENS:
            if time.perf_counter() - began > VISIBLE_TIMEOUT_S:
                raise TimeoutError(f"prompt {turn} is not in {self._tier}")
            time.sleep(0.001)
        return {"seconds": time.perf_counter() - began}

    def retrieve(self, turn: int) -> dict[str, float]:
        """Load a prompt; return the seconds. Every byte is compared."""
        tokens = _tokens(turn)
        self._target.zero_()
        began = time.perf_counter()
        mask = self._engine.retrieve(tokens, **self._arguments(self._target))
        seconds = time.perf_counter() - began
        self._source[0, 0, :, 0] = float(turn + 1)
        if int(mask.sum()) != NUM_TOKENS:
            raise ValueError(f"{int(mask.sum())} of {NUM_TOKENS} tokens of prompt {turn} came back")
        if not torch.equal(self._source.view(torch.int16), self._target.view(torch.int16)):
            raise ValueError(f"other bytes than were stored came back for prompt {turn}")
        return {"seconds": seconds}

    def lookup(self, turn: int) -> dict[str, float]:
        """Look a prompt up; return the seconds."""
        tokens = _tokens(turn)
        began = time.perf_counter()
        num_tokens = self._engine.lookup(tokens, search_range=[self._tier])
        seconds = time.perf_counter() - began
        if num_tokens != NUM_TOKENS:
            raise ValueError(f"{num_tokens} of {NUM_TOKENS} tokens of prompt {turn} were found")
        return {"seconds": seconds}

    def stores(self, turn: int) -> dict[str, float]:
        """Store many prompts in memory; return the seconds."""
        prompts = [_tokens(turn * PROMPTS_AT_ONCE + i) for i in range(PROMPTS_AT_ONCE)]
        arguments = self._arguments(self._source)
        began = time.perf_counter()
        for tokens in prompts:
            self._engine.store(tokens, **arguments)
        return {"seconds": time.perf_counter() - began}

    def retrieves(self, turn: int) -> dict[str, float]:
        """Load them; return the seconds. All must be there."""
        prompts = [_tokens(turn * PROMPTS_AT_ONCE + i) for i in range(PROMPTS_AT_ONCE)]
        arguments = self._arguments(self._target)
        began = time.perf_counter()
        num_tokens = sum(int(self._engine.retrieve(t, **arguments).sum()) for t in prompts)
        seconds = time.perf_counter() - began
        if num_tokens != PROMPTS_AT_ONCE * NUM_TOKENS:
            raise ValueError(f"{num_tokens} of {PROMPTS_AT_ONCE * NUM_TOKENS} tokens came back")
        if not torch.equal(self._source.view(torch.int16), self._target.view(torch.int16)):
            raise ValueError("other bytes than were stored came back")
        return {"seconds": seconds}


def _tokens(turn: int) -> torch.Tensor:
    return torch.arange(NUM_TOKENS) + turn * NUM_TOKENS


def main() -> None:
    """Answer until stdin ends."""
    kind, tier, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine's own output is not an answer
    if "--small" in sys.argv:
        globals().update(SMALL)
    driver = Driver(*{"ours": ours, "lmcache": lmcache}[kind](options), tier)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(getattr(driver, ask["do"])(ask["turn"])), file=answers, flush=True)
    os._exit(0)  # the bench removes files and servers


if __name__ == "__main__":
    main()
