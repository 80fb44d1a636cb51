"""What the workers of a node cost their sidecar, each other and vLLM's steps: the requests with
which 1 and 8 workers store what a prefill step has computed, all at once, and a request of the
scheduler during these stores.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.integrations.vllm.scheduler import WAIT_S
from lmcache_core.telemetry import Counters

from tests.bench.codec_neighbours import other_load
from tests.bench.engines import sidecar_process
from tests.bench.report import Section
from tests.bench.workers_child import CHUNK_BYTES, REQUESTS, metadata_of, open_store
from tests.fixtures.chains import chain_of

NUM_WORKERS = (1, 8)
NUM_CHUNKS = (4, 32)
"""Of a step of 1,024 tokens, and of one of 8,192."""
NUM_STEPS = 200
ARENA_STEPS = 24
WARM_UP_STEPS = 2 * ARENA_STEPS
"""After these the arena is full, and every step evicts as much as it stores."""
GOAL_MS = 1.0
NANOSECONDS = 1e9


@dataclass(frozen=True)
class Taken:
    """Steps of some workers.

    Attributes:
        waits: Of each step, of each worker, the seconds that vLLM's step waits for its store.
        steps: Likewise, the seconds of the requests that its store threads make.
        idle_waits: Seconds that vLLM's scheduler waits for an answer about a new request, while
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
    def wait_ms(self) -> float:
        """How long the slowest step of those at once waits, median."""
        return statistics.median(map(max, self.waits)) * 1e3

    @property
    def added_ms(self) -> float:
        """How much longer a step of vLLM takes because of the stores, median."""
        return (statistics.median(self.busy_waits) - statistics.median(self.idle_waits)) * 1e3

    @property
    def slowest_ms(self) -> float:
        """How long the requests of the slowest worker of a step take, median."""
        return statistics.median(max(map(sum, step)) for step in self.steps) * 1e3

    @property
    def p99_ms(self) -> float:
        """Of all requests."""
        seconds = [one for step in self.steps for worker in step for one in worker]
        return statistics.quantiles(seconds, n=100)[98] * 1e3

    def request_ms(self, number: int) -> float:
        """How long one of `REQUESTS` takes, median."""
        return statistics.median(worker[number] for step in self.steps for worker in step) * 1e3


def measure(run: Callable[[str, Callable[[], Any]], Any], directory: Path) -> tuple[Section, str]:
    """Measure; takes half a minute.

    Args:
        run: Shows the name of a part while it runs.
        directory: For sockets, settings and logs.

    Returns:
        The table, and a sentence about other load on the machine.
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
    return table(taken), remark


def take(directory: Path, num_workers: int, num_chunks: int, num_steps: int = NUM_STEPS) -> Taken:
    """Have workers store steps through a sidecar of their own."""
    arena_gb = ARENA_STEPS * num_workers * num_chunks * CHUNK_BYTES / (1 << 30)
    with ExitStack() as opened:
        socket, pid = opened.enter_context(sidecar_process(directory, arena_gb))
        children = [
            opened.enter_context(_child(socket, rank, num_workers, num_chunks))
            for rank in range(num_workers)
        ]
        ask = opened.enter_context(_scheduler(socket, num_workers, num_chunks))
        for child in children:
            _line(child)  # it has started
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
    """A row for each number of chunks and of workers."""
    rows = []
    for (num_chunks, num_workers), one in taken.items():
        later_ms = one.slowest_ms - taken[num_chunks, min(NUM_WORKERS)].slowest_ms
        rows.append(
            (
                f"{num_chunks} chunks, {num_workers} workers",
                str(num_workers * len(REQUESTS)),
                *(f"{s / len(one.steps) * 1e3:.2f}" for s in (one.loop_s, one.sidecar_s)),
                *(f"{one.request_ms(number):.2f}" for number in range(len(REQUESTS))),
                f"{one.p99_ms:.2f}",
                f"{one.slowest_ms:.2f}",
                "" if num_workers == 1 else f"{later_ms:.2f}",
                f"{one.wait_ms:.2f}",
                f"{statistics.median(one.idle_waits) * 1e3:.2f}",
                f"{one.added_ms:.2f}",
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
def _child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bench.workers_child"]
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def _scheduler(socket: Path, num_workers: int, num_chunks: int) -> Iterator[Callable[[], float]]:
    """What asks about a new request as vLLM's scheduler does, first without waiting and then in
    its next step; it returns the seconds that both calls take.
    """
    store = open_store(str(socket), metadata_of(0, num_workers), Counters())
    numbers = itertools.count()

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

    try:
        yield ask
    finally:
        store.close()


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


def _step(children: list[subprocess.Popen[str]]) -> list[list[float]]:
    """One step of all workers; the seconds that each waits, and those of its requests."""
    _begin(children)
    return _end(children)


def _begin(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.write("step\n")
        child.stdin.flush()


def _end(children: list[subprocess.Popen[str]]) -> list[list[float]]:
    seconds: list[list[float]] = [json.loads(_line(child)) for child in children]
    if any(len(of_worker) != 1 + len(REQUESTS) for of_worker in seconds):
        raise AssertionError(f"a worker made other requests than {REQUESTS}")
    return seconds


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("a worker has ended; its error is above")
    return line


def _processor_seconds(pid: int) -> tuple[float, float]:
    """Processor time so far of a sidecar's loop, which is its main thread, and of all threads."""
    seconds = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / NANOSECONDS
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return seconds[pid], sum(seconds.values())
