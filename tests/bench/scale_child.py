"""One of several engines at a sidecar, for `scale`: obeys the lines `store`, `lookup`,
`retrieve` and `check`, and answers each with the seconds of every call.

Usage: python -m tests.bench.scale_child SOCKET NUMBER NUM_PROMPTS
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable

import torch
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.bench.shape import DTYPE, KVCaches, make_config

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 12, 2, 32
NUM_TOKENS = 256
PROMPT_BYTES = 2 * NUM_LAYERS * NUM_TOKENS * NUM_HEADS * HEAD_SIZE * 2
"""The demo's first model, one chunk."""


class Prompts:
    """The prompts of one engine.

    Args:
        engine: Stores and retrieves them.
        number: Of the engine.
        num_prompts: How many.
    """

    def __init__(self, engine: LMCacheEngine, number: int, num_prompts: int) -> None:
        self._engine = engine
        first = number * num_prompts
        self._prompts = [
            torch.arange(NUM_TOKENS) + (first + i) * NUM_TOKENS for i in range(num_prompts)
        ]
        self._kv, self._out = _kv(number + 1), _kv(0)

    def store(self, tokens: torch.Tensor) -> None:
        """Store a prompt."""
        self._engine.store(tokens, kvcaches=self._kv)

    def lookup(self, tokens: torch.Tensor) -> None:
        """Look it up."""
        if self._engine.lookup(tokens) != NUM_TOKENS:
            raise AssertionError("a prompt is not found")

    def retrieve(self, tokens: torch.Tensor) -> None:
        """Load it."""
        if not self._engine.retrieve(tokens, kvcaches=self._out).all():
            raise AssertionError("a prompt does not come back")

    def check(self, tokens: torch.Tensor) -> None:
        """Load it, and compare."""
        for side in itertools.chain(*self._out):
            side.zero_()
        self.retrieve(tokens)
        for was, now in zip(itertools.chain(*self._kv), itertools.chain(*self._out), strict=True):
            if not torch.equal(was, now):
                raise AssertionError("other bytes than were stored came back")

    def all(self, call: Callable[[torch.Tensor], None]) -> list[float]:
        """Return the seconds of a call for each prompt."""
        seconds = []
        for tokens in self._prompts:
            began = time.perf_counter()
            call(tokens)
            seconds.append(time.perf_counter() - began)
        return seconds


def _kv(value: int) -> KVCaches:
    shape = (NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
    return tuple(
        (torch.full(shape, value + i, dtype=DTYPE), torch.full(shape, -value - i, dtype=DTYPE))
        for i in range(NUM_LAYERS)
    )


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    socket, number, num_prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = make_config(sidecar_socket=socket, tier_timeout_s=60.0)
    shape = (NUM_LAYERS, 2, NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
    metadata = LMCacheEngineMetadata("bench/small-prompts", 1, 0, "vllm", DTYPE, shape)
    connector = VLLMNestedTupleGPUConnector(NUM_HEADS * HEAD_SIZE, NUM_LAYERS)
    database = ChunkedTokenDatabase(config, metadata)
    with LMCacheEngine(config, metadata, None, database, connector) as engine:
        prompts = Prompts(engine, number, num_prompts)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(prompts.all(getattr(prompts, line.strip()))), flush=True)


if __name__ == "__main__":
    main()
