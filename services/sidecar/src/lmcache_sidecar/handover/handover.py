"""Hands over the chunks that only this sidecar holds, hottest first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, MissReason
from lmcache_core.telemetry import Counters
from lmcache_node.drain import ChunkHandover, DrainProgress
from lmcache_node.local_chunks import LocalChunks
from typing_extensions import override

from lmcache_sidecar import metrics
from lmcache_sidecar.handover.takers import (
    MAX_BATCH_CHUNKS,
    NotWelcomeError,
    Taker,
    TakerSource,
)

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Consecutive batches without progress after which a taker is abandoned, and attempts to list
takers.
"""
FIRST_PAUSE_S = 0.25
MAX_BATCH_BYTES = 16 << 20
"""Chunks sent to one taker at a time; a larger chunk is sent alone."""
_MAY_COME_LATER = frozenset(
    {MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN, MissReason.DEADLINE, MissReason.NO_MEMORY}
)


@dataclass
class TakerBatch:
    """Chunks being handed to one taker.

    Attributes:
        keys: Those not settled yet, hottest first.
        refused: Those that the taker refuses; they stay in `keys`.
    """

    keys: list[ChunkKey]
    num_settled: int = 0
    refused: set[ChunkKey] = field(default_factory=set)

    def settle(self, key: ChunkKey) -> None:
        """Count a chunk as settled."""
        self.keys.remove(key)
        self.num_settled += 1


class WaitingChunks:
    """A queue: a chunk that is taken out and not settled returns to its place. For one event loop.

    Args:
        chunks: Names and sizes in bytes, hottest first.
    """

    def __init__(self, chunks: Sequence[tuple[ChunkKey, int]]) -> None:
        self._chunks = tuple(chunks)
        self._places = {key: place for place, (key, _) in enumerate(chunks)}
        self._heap = list(range(len(chunks)))  # indices; sorted, which is a valid heap
        self._refused_by: dict[ChunkKey, set[str]] = {}

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def num_refused(self) -> int:
        """Return how many waiting chunks at least one taker has refused."""
        return sum(self._chunks[place][0] in self._refused_by for place in self._heap)

    @contextmanager
    def batch(self, taker: str) -> Iterator[TakerBatch]:
        """Take the next chunks that this taker has not refused; empty if there are none. Those not
        settled inside return to the queue.
        """
        batch = TakerBatch(self._take(taker))
        try:
            yield batch
        finally:
            for key in batch.refused:
                self._refused_by.setdefault(key, set()).add(taker)
            for key in batch.keys:
                heappush(self._heap, self._places[key])

    def _take(self, taker: str) -> list[ChunkKey]:
        taken: list[ChunkKey] = []
        passed: list[int] = []
        num_bytes = 0
        while self._heap and len(taken) < MAX_BATCH_CHUNKS:
            key, size = self._chunks[self._heap[0]]
            if taker in self._refused_by.get(key, ()):
                passed.append(heappop(self._heap))
                continue
            num_bytes += size
            if taken and num_bytes > MAX_BATCH_BYTES:
                break
            heappop(self._heap)
            taken.append(key)
        for place in passed:
            heappush(self._heap, place)
        return taken


class PodHandover(ChunkHandover):
    """Hands chunks to the remote tier and to peers. Each source of takers gets its share of the
    time, plus what earlier ones have left of theirs.

    Args:
        sources: Sources of receivers; each is asked for what the previous one has left.
        counters: Counters of results, under the names of `lmcache_sidecar.metrics`.
    """

    writing_share = 0.5

    def __init__(
        self, chunks: LocalChunks, sources: Sequence[TakerSource], counters: Counters
    ) -> None:
        self._chunks = chunks
        self._sources = tuple(sources)
        self._counters = counters
        self.has_takers = bool(sources)

    @override
    def count(self) -> int:
        return len(self._chunks.hottest_first())

    @override
    async def run(self, progress: DrainProgress, deadline: float) -> None:
        waiting = await asyncio.to_thread(lambda: WaitingChunks(self._chunks.hottest_first()))
        progress.total = len(waiting)
        now = asyncio.get_running_loop().time
        for i, source in enumerate(self._sources):
            if not waiting:
                break
            limit = asyncio.timeout((deadline - now()) / (len(self._sources) - i))
            try:
                async with limit:
                    await self._hand_to(source, waiting, progress)
            except TimeoutError:
                if not limit.expired():
                    raise
        self._fail(progress, waiting.num_refused)
        self._counters.add(metrics.DRAINED_CHUNKS_TOTAL, progress.left, "left")

    @override
    async def close(self) -> None:
        for source in self._sources:
            await source.close()

    async def _hand_to(
        self, source: TakerSource, waiting: WaitingChunks, progress: DrainProgress
    ) -> None:
        """Run all takers of a source in parallel until none of them can take more."""
        takers = await self._takers(source)
        while takers and waiting:
            before = len(waiting), len(takers)
            async with asyncio.TaskGroup() as group:
                serving = [
                    group.create_task(self._serve(taker, waiting, progress)) for taker in takers
                ]
            takers = [
                taker for taker, served in zip(takers, serving, strict=True) if served.result()
            ]
            if (len(waiting), len(takers)) == before:
                break

    async def _takers(self, source: TakerSource) -> Sequence[Taker]:
        for i in range(MAX_TRIES):
            try:
                return await source.takers()
            except UnavailableError as exc:
                logger.warning("receivers of chunks unknown: error=%s", exc)
                if i < MAX_TRIES - 1:
                    await asyncio.sleep(FIRST_PAUSE_S * 2**i)
        return ()

    async def _serve(self, taker: Taker, waiting: WaitingChunks, progress: DrainProgress) -> bool:
        """Send one taker batch after batch; False when it accepts no more."""
        num_in_vain = 0
        while True:
            is_away = False
            with waiting.batch(taker.name) as batch:
                if not batch.keys:
                    return True
                try:
                    await self._hand_batch(taker, batch, progress)
                except UnavailableError as exc:
                    is_away = True
                    logger.warning("chunks not taken: taker=%s error=%s", taker.name, exc)
                    if isinstance(exc, NotWelcomeError):
                        return False
            num_in_vain = 0 if batch.num_settled else num_in_vain + 1
            if num_in_vain >= MAX_TRIES:
                return False
            if is_away:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** max(0, num_in_vain - 1))

    async def _hand_batch(self, taker: Taker, batch: TakerBatch, progress: DrainProgress) -> None:
        keys = list(batch.keys)
        for key, is_elsewhere in zip(keys, await taker.has(keys), strict=True):
            if is_elsewhere:
                batch.settle(key)
                progress.already_elsewhere += 1
                self._counters.add(metrics.DRAINED_CHUNKS_TOTAL, 1, "already_elsewhere")
        keys = list(batch.keys)
        if not keys:
            return
        results = await self._chunks.read(keys)
        chunks = [result for result in results if isinstance(result, Chunk)]
        try:
            for key, result in zip(keys, results, strict=True):
                if not isinstance(result, Chunk) and result.reason not in _MAY_COME_LATER:
                    batch.settle(key)
                    self._fail(progress, 1)
            taken = await taker.put(chunks) if chunks else []
            for chunk, is_taken in zip(chunks, taken, strict=True):
                if not is_taken:
                    batch.refused.add(chunk.key)
                    continue
                batch.settle(chunk.key)
                progress.handed_over += 1
                self._counters.add(metrics.DRAINED_CHUNKS_TOTAL, 1, "handed_over")
                self._counters.add(metrics.HANDED_OVER_BYTES_TOTAL, chunk.num_bytes)
        finally:
            for chunk in chunks:
                chunk.release()

    def _fail(self, progress: DrainProgress, num_chunks: int) -> None:
        progress.failed += num_chunks
        self._counters.add(metrics.DRAINED_CHUNKS_TOTAL, num_chunks, "failed")
