"""One of several workers at a sidecar, for `workers`: for each line of its input it stores what a
prefill step has computed, as vLLM's worker does, and answers with the seconds that the step waits
and those of its requests.

Usage: python -m tests.bench.workers_child SOCKET RANK NUM_WORKERS NUM_CHUNKS
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.stores import SidecarClient, create_chunk_store
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.integrations.vllm.plan import Store
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads
from lmcache_core.keys import CacheEngineKey
from lmcache_core.telemetry import Counters

from tests.bench.shape import CHUNK_SIZE, make_config

MODEL = "bench/workers"
GROUP = LayerGroup("", 1, 1, 16, "bfloat16", packing="kv_first")
"""Small KV: what a sidecar does for a chunk does not depend on its size."""
BLOCK_SIZE = 16
CHUNK_BYTES = KVLayout((GROUP,)).num_bytes(CHUNK_SIZE)
REQUESTS = ("lookup", "reserve", "put")
STORE_TIMEOUT_S = 30.0


class Stopwatch:
    """A chunk store whose requests are timed.

    Args:
        store: The store.

    Attributes:
        seconds: Of each request, in order.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._store, name)
        return self._timed(method) if name in REQUESTS else method

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            answer = method(*args)
            self.seconds.append(time.perf_counter() - began)
            return answer

        return timed


def chunks_of(step: int, rank: int, num_workers: int, num_chunks: int) -> list[NamedChunk]:
    """The chunks of a step, which no other step has."""
    return [
        (
            i * CHUNK_SIZE,
            (i + 1) * CHUNK_SIZE,
            CacheEngineKey("vllm", MODEL, num_workers, rank, f"{step:032x}{i:032x}"),
        )
        for i in range(num_chunks)
    ]


def metadata_of(rank: int, num_workers: int) -> LMCacheEngineMetadata:
    """Of one rank; the scheduler is told that of the first."""
    shape = (GROUP.num_layers, 2, CHUNK_SIZE, GROUP.num_kv_heads, GROUP.head_size)
    return LMCacheEngineMetadata(MODEL, num_workers, rank, "vllm", torch.bfloat16, shape)


def open_store(socket: str, metadata: LMCacheEngineMetadata, counters: Counters) -> ChunkStore:
    """A connection to the sidecar; the caller closes it."""
    config = make_config(sidecar_socket=socket)
    client = SidecarClient("vllm/bench", loads_beside=True)
    opened = create_chunk_store(config, metadata, None, counters, None, client)
    opened.open(lambda salt: None)
    return opened


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    socket, (rank, num_workers, num_chunks) = sys.argv[1], map(int, sys.argv[2:])
    layout, num_tokens = KVLayout((GROUP,)), num_chunks * CHUNK_SIZE
    metadata, counters = metadata_of(rank, num_workers), Counters()
    opened = open_store(socket, metadata, counters)
    pages = torch.zeros(2, num_tokens // BLOCK_SIZE, BLOCK_SIZE, 1, 16, dtype=torch.bfloat16)
    kwargs = {"kvcaches": [pages], "slot_mapping": torch.arange(num_tokens)}
    digests = Workers("lmcache-digest")
    digests.open()
    store: Any = Stopwatch(opened)
    transfer = KVTransfer(store, PagedGPUConnector(layout), metadata, counters, digests)
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
    named: list[NamedChunk] = []

    def begin(pending: PendingStore) -> Callable[[], None]:
        begun = transfer.begin_store(named, kwargs)
        threads.launched(pending, ())
        return lambda: ended.put(all(transfer.finish_store(begun)))

    threads = StoreThreads(begin, STORE_TIMEOUT_S)
    threads.open()
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin):
        named = chunks_of(step, rank, num_workers, num_chunks)
        store.seconds.clear()
        if store.lookup([key for _, _, key in named], None):
            raise AssertionError("a chunk is known before it is stored")
        pending = PendingStore(Store(f"{step}", ()), num_chunks * CHUNK_BYTES, 0.0, None)
        began = time.perf_counter()
        threads.submit(pending)
        waited_s = time.perf_counter() - began
        if not ended.get(timeout=STORE_TIMEOUT_S):
            raise AssertionError("a chunk was not stored")
        print(json.dumps([waited_s, *store.seconds]), flush=True)
    threads.close()
    digests.close()
    opened.close()


if __name__ == "__main__":
    main()
