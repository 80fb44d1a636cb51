"""What a chunk costs apart from its bytes: 1 KiB chunks in prompts of 16, kept in host memory."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator, MemoryObj
from lmcache_core.token_database import ChunkedTokenDatabase
from typing_extensions import override

from tests.bench.measure import timed
from tests.bench.shape import DTYPE, KVCaches, make_config

CHUNK_SIZE, HEAD_SIZE = 16, 16
PROMPT_CHUNKS, NUM_PROMPTS = 16, 50
COUNTED_CHUNKS = 1024
ARENA_BYTES = 64 << 20
GOALS_US = {"store": 25.0, "retrieve": 20.0}


@dataclass(frozen=True)
class ChunkCost:
    """One row.

    Attributes:
        name: What was done, and how digests were checked.
        seconds: Each round of `NUM_PROMPTS` prompts.
        objects: Python objects a chunk, at most so many at one time during a call.
        goal_us: At most so long a chunk at the median.
    """

    name: str
    seconds: tuple[float, ...]
    objects: float
    goal_us: float

    @property
    def chunk_us(self) -> float:
        """Median, microseconds a chunk."""
        return statistics.median(self.seconds) / (NUM_PROMPTS * PROMPT_CHUNKS) * 1e6


class CountingConnector(VLLMNestedTupleGPUConnector):
    """Notes how many objects there are while chunks are copied."""

    num_objects = 0

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        super().from_gpu(memory_obj, start, end, **kwargs)
        self.num_objects = max(self.num_objects, sys.getallocatedblocks())

    @override
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        super().to_gpu(memory_obj, start, end, **kwargs)
        self.num_objects = max(self.num_objects, sys.getallocatedblocks())


def chunk_costs() -> list[ChunkCost]:
    """Store and retrieve, with and without digests; takes about five seconds."""
    return [cost for verify_hot in ("always", "never") for cost in _costs(verify_hot)]


def _costs(verify_hot: str) -> Iterator[ChunkCost]:
    config = make_config(verify_hot=verify_hot, chunk_size=CHUNK_SIZE)
    metadata = LMCacheEngineMetadata(
        "bench/small", 1, 0, "vllm", DTYPE, (1, 2, CHUNK_SIZE, 1, HEAD_SIZE)
    )
    kv, out = _kv(), _kv()
    counting = CountingConnector(HEAD_SIZE, 1)

    @contextmanager
    def engine_with(connector: VLLMNestedTupleGPUConnector) -> Iterator[LMCacheEngine]:
        allocator = HostMemoryAllocator(ARENA_BYTES)
        database = ChunkedTokenDatabase(config, metadata)
        engine = LMCacheEngine(config, metadata, allocator, database, connector)
        engine.open()
        try:
            yield engine
        finally:
            engine.close()

    def store(engine: LMCacheEngine, prompt: torch.Tensor) -> None:
        engine.store(prompt, kvcaches=kv)

    def retrieve(engine: LMCacheEngine, prompt: torch.Tensor) -> None:
        if not engine.retrieve(prompt, kvcaches=out).all():
            raise AssertionError("the prompt is not in memory")

    plain = VLLMNestedTupleGPUConnector(HEAD_SIZE, 1)
    with engine_with(plain) as engine, engine_with(counting) as counted:
        for call in (store, retrieve):
            gc.collect()
            counting.num_objects = before = sys.getallocatedblocks()
            call(counted, _prompt(0, COUNTED_CHUNKS))
            objects = (counting.num_objects - before) / COUNTED_CHUNKS
            seconds = timed(partial(_prompts, call, engine))
            name = f"{call.__name__}, verify_hot {verify_hot}"
            yield ChunkCost(name, seconds, objects, GOALS_US[call.__name__])


def _prompts(call: Callable[..., None], engine: LMCacheEngine, turn: int) -> None:
    for number in range(NUM_PROMPTS):
        call(engine, _prompt(turn * NUM_PROMPTS + number, PROMPT_CHUNKS))


def _kv() -> KVCaches:
    shape = (COUNTED_CHUNKS * CHUNK_SIZE, 1, HEAD_SIZE)
    return ((torch.ones(shape, dtype=DTYPE), torch.ones(shape, dtype=DTYPE)),)


def _prompt(number: int, num_chunks: int) -> torch.Tensor:
    """Token ids of a prompt that no other number has."""
    num_tokens = num_chunks * CHUNK_SIZE
    return torch.arange(num_tokens) + number * COUNTED_CHUNKS * CHUNK_SIZE
