"""The section `workers` of docs/benchmarks.md: what the workers of a node cost their sidecar, each
other and vLLM's steps. 1 and 8 workers store what a prefill step has computed, all at once, and the
scheduler asks during these stores.

`python -m tests.bench.workers SOCKET RANK NUM_WORKERS NUM_CHUNKS` is one worker. For each line of
its input it stores a step as vLLM's worker does, and answers with the seconds that the step waits
and those of its requests.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.stores import SidecarClient
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.integrations.vllm.plan import Store
from lmcache_core.integrations.vllm.scheduler import WAIT_S
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads
from lmcache_core.keys import CacheEngineKey
from lmcache_core.telemetry import Counters

from tests.bench.child import Child
from tests.bench.engines import CHUNK_SIZE, make_config, running_store, sidecar_process
from tests.bench.measure import Run, median_ms, other_load, percentile
from tests.bench.report import Findings, Section
from tests.fixtures.chains import chain_of

NUM_WORKERS = (1, 8)
NUM_CHUNKS = (4, 32)
"""Of a step of 1,024 tokens, and of one of 8,192."""
NUM_STEPS = 200
ARENA_STEPS = 24
WARM_UP_STEPS = 2 * ARENA_STEPS
"""After these the arena is full, and every step evicts as much as it stores."""
GOAL_MS = 1.0

MODEL = "bench/workers"
GROUP = LayerGroup("", 1, 1, 16, "bfloat16", packing="kv_first")
"""Small KV: what a sidecar does for a chunk does not depend on its size."""
BLOCK_SIZE = 16
CHUNK_BYTES = KVLayout((GROUP,)).num_bytes(CHUNK_SIZE)
REQUESTS = ("lookup", "reserve", "put")
STORE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Taken:
    """Steps of some workers.

    Attributes:
        waits: Of each step, of each worker, the seconds that vLLM's step waits for its store.
        steps: Likewise, the seconds of each request that its store threads make.
        idle_waits: Seconds that vLLM's scheduler waits for an answer about a new request while
            nothing is stored.
        busy_waits: The same at a random time during the stores of a step, plus the wait of its
            slowest worker.
        has_priority: Whether the scheduler did not have to wait for a processor.
        loop_s: Processor time of the sidecar's loop, all steps together.
        sidecar_s: Of all of its threads.
    """

    waits: list[list[float]]
    steps: list[list[list[float]]]
    idle_waits: list[float]
    busy_waits: list[float]
    has_priority: bool
    loop_s: float
    sidecar_s: float

    @property
    def stores(self) -> list[float]:
        """Seconds of the requests of the slowest worker of each step."""
        return [max(map(sum, step)) for step in self.steps]


def measure(run: Run, directory: Path) -> Findings:
    """Measure; takes a minute.

    Args:
        directory: For sockets, settings and logs.
    """
    load = other_load()
    taken = {
        (num_chunks, num_workers): run(
            f"prefill steps of {num_chunks} chunks, {num_workers} workers",
            lambda: take(directory, num_workers, num_chunks),  # noqa: B023 (run at once)
        )
        for num_chunks in NUM_CHUNKS
        for num_workers in NUM_WORKERS
    }
    remark = f"Other processes used {load:.1f} cores."
    if not all(one.has_priority for one in taken.values()):
        remark += " The scheduler had to wait for processors, which the workers used."
    return Findings([table(taken)], [remark])


def take(directory: Path, num_workers: int, num_chunks: int, num_steps: int = NUM_STEPS) -> Taken:
    """Have workers store steps through a sidecar of their own."""
    arena_gb = ARENA_STEPS * num_workers * num_chunks * CHUNK_BYTES / (1 << 30)
    with ExitStack() as opened:
        socket, pid = opened.enter_context(sidecar_process(directory, arena_gb))
        command = [sys.executable, "-m", "tests.bench.workers", str(socket)]
        children = [
            opened.enter_context(Child([*command, *map(str, (rank, num_workers, num_chunks))]))
            for rank in range(num_workers)
        ]
        ask = opened.enter_context(_scheduler(socket, num_workers, num_chunks))
        for child in children:
            child.answer()  # it has started
        for _ in range(WARM_UP_STEPS):
            _step(children)
        before = _processor_seconds(pid)
        seconds = [_step(children) for _ in range(num_steps)]
        after = _processor_seconds(pid)
        # In steps of their own: the questions use the sidecar's loop too.
        store_s = statistics.median(max(sum(requests) for _, *requests in step) for step in seconds)
        idle_waits, busy_waits, random_times = [], [], random.Random(0)
        with _own_processor() as has_priority:
            for _ in range(num_steps):
                idle_waits.append(ask())
                _begin(children)
                time.sleep(random_times.uniform(0.0, store_s))
                asked_s = ask()
                busy_waits.append(asked_s + max(wait for wait, *_ in _end(children)))
    return Taken(
        [[wait for wait, *_ in step] for step in seconds],
        [[requests for _, *requests in step] for step in seconds],
        idle_waits,
        busy_waits,
        has_priority,
        *(now - then for now, then in zip(after, before, strict=True)),
    )


def table(taken: dict[tuple[int, int], Taken]) -> Section:
    """Return a row for each number of chunks and of workers. Times are medians over the steps."""
    rows = []
    for (num_chunks, num_workers), one in taken.items():
        alone = taken[num_chunks, min(NUM_WORKERS)]
        later_s = statistics.median(one.stores) - statistics.median(alone.stores)
        added_s = statistics.median(one.busy_waits) - statistics.median(one.idle_waits)
        requests = [worker for step in one.steps for worker in step]
        rows.append(
            (
                f"{num_chunks} chunks, {num_workers} workers",
                str(num_workers * len(REQUESTS)),
                *(f"{s / len(one.steps) * 1e3:.2f}" for s in (one.loop_s, one.sidecar_s)),
                *(median_ms(of_kind) for of_kind in zip(*requests, strict=True)),
                f"{percentile(list(itertools.chain(*requests)), 99) * 1e3:.2f}",
                median_ms(one.stores),
                "" if num_workers == 1 else f"{later_s * 1e3:.2f}",
                median_ms(list(map(max, one.waits))),
                median_ms(one.idle_waits),
                f"{added_s * 1e3:.2f}",
                f"{GOAL_MS:g}",
                "",
            )
        )
    headings = (
        "a worker's step",
        "requests a step",
        "sidecar's loop",
        "all of the sidecar",
        "lookup p50",
        "reserve p50",
        "commit p50",
        "request p99",
        "slowest store",
        "later than one alone",
        "slowest step's wait",
        "scheduler's question",
        "added to a step",
        "goal",
        "",
    )
    return Section("Workers that store a prefill step at once, ms a step", headings, rows)


@contextmanager
def _scheduler(socket: Path, num_workers: int, num_chunks: int) -> Iterator[Callable[[], float]]:
    """Yield what asks about a new request as vLLM's scheduler does, first without waiting and then
    in its next step; it returns the seconds that both calls take.
    """
    numbers = itertools.count()
    with _store_at(str(socket), _metadata_of(0, num_workers)) as (store, _):

        def ask() -> float:
            ticket = f"request {next(numbers)}"
            chain = chain_of((f"{ticket} {i}" for i in range(num_chunks)), num_workers)
            began = time.perf_counter()
            store.stage(ticket, [chain], wait_s=0.0)
            staged = store.stage(ticket, [chain], wait_s=WAIT_S)
            seconds = time.perf_counter() - began
            if staged is not None and any(any(tiers) for tiers in staged.tiers):
                raise AssertionError("a request is known before it is stored")
            store.unstage([ticket])
            return seconds

        yield ask


@contextmanager
def _own_processor() -> Iterator[bool]:
    """Let this thread run whenever it can, as vLLM's scheduler does where eight GPUs are; False if
    that is not permitted.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _step(children: list[Child]) -> list[list[float]]:
    """Have all workers store one step; the seconds that each waits, and those of its requests."""
    _begin(children)
    return _end(children)


def _begin(children: list[Child]) -> None:
    for child in children:
        child.send("step")


def _end(children: list[Child]) -> list[list[float]]:
    seconds: list[list[float]] = [child.answer() for child in children]
    if any(len(of_worker) != 1 + len(REQUESTS) for of_worker in seconds):
        raise AssertionError(f"a worker made other requests than {REQUESTS}")
    return seconds


def _processor_seconds(pid: int) -> tuple[float, float]:
    """Return the processor time so far of a sidecar's loop, which is its main thread, and of all
    its threads; to the nanosecond.
    """
    seconds = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return seconds[pid], sum(seconds.values())


# --- The process of a worker ----------------------------------------------------------------------


class _Stopwatch:
    """A chunk store whose requests are timed.

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


def _metadata_of(rank: int, num_workers: int) -> LMCacheEngineMetadata:
    shape = (GROUP.num_layers, 2, CHUNK_SIZE, GROUP.num_kv_heads, GROUP.head_size)
    return LMCacheEngineMetadata(MODEL, num_workers, rank, "vllm", torch.bfloat16, shape)


def _store_at(socket: str, metadata: LMCacheEngineMetadata) -> Any:
    client = SidecarClient("vllm/bench", loads_beside=True)
    return running_store(make_config(sidecar_socket=socket), metadata, client)


def _chunks_of(step: int, rank: int, num_workers: int, num_chunks: int) -> list[NamedChunk]:
    """Return the chunks of a step, which no other step has."""
    return [
        (
            i * CHUNK_SIZE,
            (i + 1) * CHUNK_SIZE,
            CacheEngineKey("vllm", MODEL, num_workers, rank, f"{step:032x}{i:032x}"),
        )
        for i in range(num_chunks)
    ]


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    socket, (rank, num_workers, num_chunks) = sys.argv[1], map(int, sys.argv[2:])
    num_tokens = num_chunks * CHUNK_SIZE
    pages = torch.zeros(2, num_tokens // BLOCK_SIZE, BLOCK_SIZE, 1, 16, dtype=torch.bfloat16)
    kwargs = {"kvcaches": [pages], "slot_mapping": torch.arange(num_tokens)}
    metadata = _metadata_of(rank, num_workers)
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
    named: list[NamedChunk] = []
    with _store_at(socket, metadata) as (opened, digests):
        store: ChunkStore | Any = _Stopwatch(opened)
        connector = PagedGPUConnector(KVLayout((GROUP,)))
        transfer = KVTransfer(store, connector, metadata, Counters(), digests)

        def begin(pending: PendingStore) -> Callable[[], None]:
            begun = transfer.begin_store(named, kwargs)
            threads.launched(pending, ())
            return lambda: ended.put(all(transfer.finish_store(begun)))

        threads = StoreThreads(begin, STORE_TIMEOUT_S)
        threads.open()
        print("1", flush=True)
        for step, _ in enumerate(sys.stdin):
            named = _chunks_of(step, rank, num_workers, num_chunks)
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


if __name__ == "__main__":
    main()
