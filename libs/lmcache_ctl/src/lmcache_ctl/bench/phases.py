"""Makes calls, several at once, and measures them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from lmcache_core.errors import LMCacheError

from lmcache_ctl.bench.report import Latency, Load, Phase

CALL_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 0.1
"""After a call that failed."""


class Done:
    """What a call came to: payload bytes of each chunk that is right, reasons of the others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_chunks = 0
        self.num_bytes = 0
        self.not_done: Counter[str] = Counter()


Call = Callable[[], Awaitable[Done | None]]
"""One call to the target; None: there is nothing more to do."""


class PhaseRun:
    """Makes calls, several at once, until there are no more or the time is over.

    Args:
        name: Of the phase.
        load: How many at once.
        seconds: How long at most.
    """

    def __init__(self, name: str, load: Load, seconds: float) -> None:
        self._name = name
        self._load = load
        self._seconds = seconds
        self._latencies: list[float] = []
        self._sum = Done()
        self._failed: Counter[str] = Counter()

    async def run(self, call: Call) -> Phase:
        """Make the calls, and measure them."""
        started = time.perf_counter()
        ends = started + self._seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.concurrency):
                group.create_task(self._work(call, ends))
        seconds = time.perf_counter() - started
        done = self._sum
        return Phase(
            self._name,
            len(self._latencies),
            done.num_chunks,
            done.num_bytes,
            round(seconds, 3),
            round(done.num_bytes / seconds),
            _latency(self._latencies),
            dict(done.not_done),
            dict(self._failed),
        )

    async def _work(self, call: Call, ends: float) -> None:
        while time.perf_counter() < ends:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    done = await call()
            except (LMCacheError, TimeoutError) as exc:
                self._failed[str(exc) or "no answer in time"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            if done is None:
                return
            self._latencies.append(done.seconds)
            self._sum.num_chunks += done.num_chunks
            self._sum.num_bytes += done.num_bytes
            self._sum.not_done.update(done.not_done)


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    shares = (0.5, 0.9, 0.99)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]
    return Latency(*(round(1000 * value, 3) for value in (*at, ordered[-1])))


def no_fetch() -> Phase:
    """Nothing was stored that could be fetched."""
    return Phase("fetch", 0, 0, 0, 0.0, 0.0, None, {}, {})
