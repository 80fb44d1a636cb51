"""Makes calls, several at once, and measures them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from lmcache_core.errors import LMCacheError

from lmcache_ctl.bench.report import Latency, Phase, Step

CALL_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 0.1
"""After a call that failed."""
TELL_S: Final = 0.2
"""Between two words on how far it is."""


class Done:
    """What a call came to: payload bytes of each chunk that is right, reasons of the others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_chunks = 0
        self.num_bytes = 0
        self.not_done: Counter[str] = Counter()


Call = Callable[[], Awaitable[Done | None]]
"""One call to the target; None: there is nothing more to do."""
Tell = Callable[[Step], None]


class PhaseRun:
    """Makes calls, several at once, until there are no more or the time is over.

    Args:
        name: Of the phase.
        concurrency: How many at once.
        seconds: How long at most.
        tell: Called again and again with how far it is.
    """

    def __init__(self, name: str, concurrency: int, seconds: float, tell: Tell) -> None:
        self._name = name
        self._concurrency = concurrency
        self._seconds = seconds
        self._tell = tell
        self._latencies: list[float] = []
        self._sum = Done()
        self._failed: Counter[str] = Counter()

    async def run(self, call: Call) -> Phase:
        """Make the calls, and measure them; errors of `CtlError` that a call raises end it."""
        started = time.perf_counter()
        ends = started + self._seconds
        telling = asyncio.create_task(self._telling(started))
        try:
            await self._all(call, ends)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        seconds = time.perf_counter() - started
        self._tell(Step(self._name, 1.0, len(self._latencies), is_over=True))
        done = self._sum
        return Phase(
            self._name,
            len(self._latencies),
            done.num_chunks,
            done.num_bytes,
            round(seconds, 3),
            round(len(self._latencies) / seconds, 1),
            round(done.num_bytes / seconds),
            _latency(self._latencies),
            dict(done.not_done),
            dict(self._failed),
        )

    async def _all(self, call: Call, ends: float) -> None:
        workers = [asyncio.create_task(self._work(call, ends)) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _telling(self, started: float) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            share = min(1.0, (time.perf_counter() - started) / self._seconds)
            self._tell(Step(self._name, share, len(self._latencies), is_over=False))

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
    return Phase("fetch", 0, 0, 0, 0.0, 0.0, 0.0, None, {}, {})
