"""The section `mlperf` of docs/benchmarks.md: the driver of MLPerf Storage's KV cache benchmark,
with our tiers in the place of its own and with its own, in turn.

A request stores an entry, the KV of all its tokens, and reads it several times. The driver swallows
what a backend raises and compares no bytes, so its calls are counted here.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from lmcache_core.concurrency.bridge import LoopThread
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.record import (
    UNSEALED_DIGEST,
    Chunk,
    Result,
    payload_digest,
    raw_header,
    release_all,
)
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.engines import CHUNK_BYTES
from tests.bench.measure import GB, OtherLoad, Run
from tests.bench.report import Findings, Section
from tests.bench.tiers import drop_from_cache

HOME, COMMIT = "MLPERF_STORAGE", "f51fe8f36dc44e3b1e11d7fafd8385509c0765fb"
MODEL, NUM_USERS, NUM_REQUESTS, ROUNDS = "llama3.1-8b", 2, 6, 2
PROMPT_TOKENS, ANSWER_TOKENS = (256, 1024), (50, 250)
LIMIT_GB, ROOM_GB = 3, 4
"""What the driver keeps in a tier at most; what ours have room for."""
NEVER_S, TIMEOUT_S, MAX_RUN_S = 1_000_000, 120.0, 600


class TierBackend:
    """One of our tiers with the methods of the benchmark's `StorageBackend`; thread-safe. An entry
    becomes chunks of 32 MiB.

    Args:
        memory: Arena for what is on its way; the tier itself in a run of host memory.
        timing: Their `IOTiming`. All is the device's time, copies between their array and the arena
            included.
        has_digests: Whether host memory computes and compares digests; other tiers always do.
        prepare: Called with an entry's chunks before it is read, not timed.

    Attributes:
        failures: What was raised.
    """

    def __init__(
        self,
        loop: LoopThread,
        memory: LocalCPUBackend,
        tier: StorageBackend,
        timing: Callable[..., Any],
        *,
        has_digests: bool = True,
        prepare: Callable[[list[ChunkKey]], object] = lambda keys: None,
    ) -> None:
        self._loop, self._memory, self._tier, self._timing = loop, memory, tier, timing
        self._is_checked_here = has_digests and tier is memory
        self._prepare = prepare
        self.failures: list[str] = []
        self._entries: dict[str, tuple[tuple[int, ...], np.dtype[Any], list[ChunkKey]]] = {}

    def write(self, key: str, data: np.ndarray) -> Any:
        self.delete(key)  # a tier keeps the chunk that it has
        began = time.perf_counter()
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        chunks: list[Chunk] = []
        with self._releasing(chunks):
            for at in range(0, raw.nbytes, CHUNK_BYTES):
                part = raw[at : at + CHUNK_BYTES]
                memory = self._memory.allocate(part.nbytes)
                if memory is None:
                    raise MemoryError(f"{key}: no room for {part.nbytes} bytes")
                name = hashlib.sha256(f"{key}/{at}".encode()).hexdigest()
                chunk_key = ChunkKey.of("default", CacheEngineKey("vllm", "mlperf", 1, 0, name))
                header = raw_header(chunk_key.key, (part.nbytes,), "uint8", UNSEALED_DIGEST)
                chunks.append(Chunk.unsealed(chunk_key, header, memory, "bench"))
                np.frombuffer(memory.byte_array, np.uint8)[:] = part
                if self._is_checked_here:
                    chunks[-1].sealed()
            if not all(self._loop.run(self._tier.batched_put(chunks), TIMEOUT_S)):
                raise OSError(f"{key}: a chunk was not stored")
        self._entries[key] = data.shape, data.dtype, [chunk.key for chunk in chunks]
        seconds = time.perf_counter() - began
        return self._timing(total=seconds, device=seconds, host=0.0)

    def read(self, key: str) -> tuple[np.ndarray, Any]:
        shape, dtype, chunk_keys = self._entries[key]  # a KeyError if it is missing, as with theirs
        self._prepare(chunk_keys)
        began = time.perf_counter()
        data = np.empty(shape, dtype)
        results: list[Result] = []
        with self._releasing(results):
            work = self._tier.batched_get(chunk_keys, self._memory.allocate)
            results += self._loop.run(work, TIMEOUT_S, discard=release_all)
            for number, chunk in enumerate(results):
                if not isinstance(chunk, Chunk):
                    raise OSError(f"{key}: {chunk}")
                payload = chunk.memory.byte_array
                if self._is_checked_here and payload_digest(payload) != chunk.header.digest:
                    raise OSError(f"{key}: other bytes came back")
                at = number * CHUNK_BYTES
                target = data.reshape(-1).view(np.uint8)[at : at + CHUNK_BYTES]
                target[:] = np.frombuffer(payload, np.uint8)
        seconds = time.perf_counter() - began
        return data, self._timing(total=seconds, device=seconds, host=0.0)

    def delete(self, key: str) -> None:
        _, _, chunk_keys = self._entries.pop(key, (None, None, []))
        self._loop.run(self._tier.batched_remove(chunk_keys), TIMEOUT_S)

    @contextmanager
    def _releasing(self, results: Sequence[Result]) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self.failures.append(str(exc))
            raise
        finally:
            release_all(results)

    def clear(self) -> None:
        for key in list(self._entries):  # a remote tier clears nothing, others may use it
            self.delete(key)


def measure(run: Run, directory: Path) -> Findings:
    """Measure all rows in turn."""
    source = Path(os.environ.get(HOME, "/nonexistent"), "kv_cache_benchmark")
    if not (source / "kv_cache").is_dir():
        raise SystemExit(f"{HOME} must be a checkout of mlcommons/storage, commit {COMMIT}")
    sys.path.insert(0, str(source))
    theirs = importlib.import_module("kv_cache")
    dice = random.Random(1)
    lines = [
        f"0,{dice.randint(*PROMPT_TOKENS)},{dice.randint(*ANSWER_TOKENS)}"
        for _ in range(NUM_REQUESTS)
    ]
    # The driver stops at the end of the trace: it answers the others while it waits for the last.
    lines = ["Timestamp,Request tokens,Response tokens", *lines, f"{NEVER_S},1,1"]
    (directory / "trace.csv").write_text("\n".join(lines), encoding="utf-8")
    loop = LoopThread("lmcache-mlperf")
    loop.open()
    memory = LocalCPUBackend(HostMemoryAllocator(ROOM_GB << 30), create_policy())
    synced = DiskBackend(directory / "synced", ROOM_GB << 30, fsync=True)
    disk = DiskBackend(directory / "disk", ROOM_GB << 30)

    def make_cold(keys: list[ChunkKey]) -> None:
        for key in keys:
            drop_from_cache(DiskLayout(directory / "synced").record(key))

    def ours(tier: StorageBackend, **options: Any) -> TierBackend:
        return TierBackend(loop, memory, tier, theirs.StorageBackend.IOTiming, **options)

    settings = {"port": 0, "lm_port": 0, "memory_gb": ROOM_GB, "instance_id": "bench"}
    with Processes(directory, quiet_environment()) as processes, OtherLoad() as others:
        _, ports = processes.start_service("cache_storage", "lmcache_storage", settings)
        lm = create_remote_backend(f"lm://127.0.0.1:{ports['lm_port']}", timeout_s=TIMEOUT_S)
        backends = {
            "cpu: its own": None,
            "cpu: our arena": ours(memory),
            "cpu: our arena, no digests": ours(memory, has_digests=False),
            "nvme: its own, fsync, read cold": None,
            "nvme: our disk tier, fsync, read cold": ours(synced, prepare=make_cold),
            "nvme: our disk tier, defaults, page cache": ours(disk),
            "nvme: our lm:// to cache_storage": ours(lm),
        }
        for tier in (lm, synced, disk):
            loop.run(tier.open(), TIMEOUT_S)
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in backends}
        for name in list(backends) * ROUNDS:
            run(name, lambda: _drive(theirs, name, backends[name], directory, found[name]))  # noqa: B023
        for tier in (lm, synced, disk):
            loop.run(tier.close(), TIMEOUT_S)
    loop.close()
    title = f"{MODEL}, {NUM_REQUESTS} requests of {NUM_USERS} users, entries of 32 to 128 MiB"
    headings = ("store GB/s", "P95 ms", "load GB/s", "P95 ms", "requests/s", "")
    rows = [(name, *_cells(of_name), "") for name, of_name in found.items()]
    section = Section(title, ("its tier: what is there", *headings), rows)
    return Findings([section], [others.remark])


def _drive(
    theirs: Any, name: str, backend: Any, directory: Path, found: dict[str, list[float]]
) -> None:
    """Run the driver once; add the seconds of each call, its bytes, and the seconds of all."""
    tier, _, _ = name.partition(":")
    before = set(threading.enumerate())
    with redirect_stdout(io.StringIO()):
        benchmark = theirs.IntegratedBenchmark(
            theirs.MODEL_CONFIGS[MODEL],
            num_users=NUM_USERS,
            gpu_memory_gb=0,
            cpu_memory_gb=LIMIT_GB if tier == "cpu" else 0,
            duration_seconds=MAX_RUN_S,
            cache_dir=str(directory / "own"),
            use_burst_trace=True,
            burst_trace_path=str(directory / "trace.csv"),
            max_requests=NUM_REQUESTS,
            enable_prefix_caching=False,  # it makes entries a few tokens shorter, by chance
            storage_capacity_gb=LIMIT_GB,
            seed=1,
        )
        if backend is not None:
            benchmark.cache.backends[tier] = backend
        summary = benchmark.run()["summary"]
    for thread in set(threading.enumerate()) - before:
        thread.join()
    found["run"].append(summary["elapsed_time"])
    stats, label = benchmark.cache.stats, "cpu" if tier == "cpu" else "storage"
    for what, verb in (("write", "written"), ("read", "read")):
        seconds = stats[f"{label}_{what}_latencies"]
        if len(seconds) != stats[f"{what}_operations"]:
            failures = getattr(backend, "failures", [])
            raise AssertionError(f"{name}: a {what} failed, or went to another tier: {failures}")
        found[what] += seconds
        found[f"{what} bytes"].append(stats[f"tier_{label}_kv_bytes_{verb}"])
    benchmark.cache.backends[tier].clear()


def _cells(found: dict[str, list[float]]) -> list[str]:
    """Return rates while a call runs, and times of an entry."""
    cells = []
    for what in ("write", "read"):
        rate = sum(found[f"{what} bytes"]) / sum(found[what]) / GB
        cells += [f"{rate:.2f}", f"{np.percentile(found[what], 95) * 1e3:.0f}"]
    return [*cells, f"{NUM_REQUESTS * len(found['run']) / sum(found['run']):.2f}"]
