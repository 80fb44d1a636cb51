"""The figures that this sidecar sends to the broker with each heartbeat."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.p2p import ModelFigures, PeerFigures
from lmcache_core.p2p.messages import (
    MAX_COUNTED_PEERS,
    bounded,
    bounded_count,
    tier_figures,
)
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.tiers import TierSet
from lmcache_core.telemetry import Counters
from lmcache_node.local_chunks import LocalChunks

from lmcache_sidecar import metrics
from lmcache_sidecar.holders import Holders

MAX_SAMPLED_CHUNKS: Final = 32
"""Size of the sample: each chunk that the remote tier lacks may cost one request to lookup."""
MEASURE_INTERVAL_S: Final = 60.0
MIN_LOAD_INTERVAL_S: Final = 1.0
"""A shorter one says little about a heartbeat's interval."""


class OwnLoad:
    """How busy this sidecar is: the share of one processor that its process has used since it was
    last asked. What else runs on the node does not count, for then all of its sidecars would be
    last choices whether they work or not.

    Args:
        clock: Seconds that have passed.
        used: Seconds of processor time that this process has used.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._used = clock, used
        self._last = clock(), used()
        self._load = 0.0

    def __call__(self) -> float:
        """Return it: 0 (idle) to 1 (a processor or more)."""
        now, used = self._clock(), self._used()
        passed_s = now - self._last[0]
        if passed_s >= MIN_LOAD_INTERVAL_S:
            self._load = min(1.0, (used - self._last[1]) / passed_s)
            self._last = now, used
        return self._load


def heartbeat_figures(
    tiers: TierSet,
    counters: Counters,
    exclusive_bytes: int | None,
    chunk_tokens: Mapping[str, float] = MappingProxyType({}),
) -> PeerFigures:
    """Return the current figures from the sidecar's counters, so that broker and `/metrics` agree.

    Args:
        counters: Counters of its engines' requests and results.
        exclusive_bytes: Bytes that only this sidecar holds; None if unknown.
        chunk_tokens: Tokens per chunk, by model.
    """
    values = counters.snapshot()

    def by_label(name: str) -> dict[str, int]:
        return bounded(
            {label: value for (of, label), value in values.items() if of == name and label}
        )

    saved_us = by_label(metrics.SAVED_PREFILL_MICROSECONDS_TOTAL)
    models = {
        model: ModelFigures(
            num_tokens,
            saved_us.get(model, 0) // 1000,
            chunk_tokens.get(model, 0),
        )
        for model, num_tokens in by_label(metrics.SAVED_TOKENS_TOTAL).items()
    }
    return PeerFigures(
        requested_chunks=bounded_count(values.get((metrics.REQUESTED_CHUNKS_TOTAL, ""), 0)),
        loaded_chunks=by_label(metrics.LOADED_CHUNKS_TOTAL),
        loaded_bytes=by_label(metrics.LOADED_BYTES_TOTAL),
        missed_chunks=by_label(metrics.MISSED_CHUNKS_TOTAL),
        stored_chunks=bounded_count(values.get((metrics.STORED_CHUNKS_TOTAL, ""), 0)),
        stored_bytes=bounded_count(values.get((metrics.STORED_BYTES_TOTAL, ""), 0)),
        pulled_bytes=(bounded(tiers.pulled or {}, MAX_COUNTED_PEERS)),
        tiers=tier_figures({tier.name: tier.stats() for tier in tiers.local}),
        sole_bytes=None if exclusive_bytes is None else bounded_count(exclusive_bytes),
        models=models,
    )


@dataclass
class ExclusiveBytes:
    """Estimates how many bytes only this sidecar holds: samples chunks at even intervals from the
    hottest to the coldest, and looks for other holders.

    Attributes:
        remote: The remote tier, without a breaker; None without one.
        holders: Finds peers and storage servers that hold chunks.
        timeout_s: Longest wait for the remote tier.
        num_bytes: The latest estimate; None if lookup or the remote tier did not answer.
    """

    chunks: LocalChunks
    remote: StorageBackend | None
    holders: Holders
    timeout_s: float
    num_bytes: int | None = None

    async def measure(self) -> None:
        """Update the estimate. Call it repeatedly."""
        # In a thread: listing a large disk would keep the loop from serving engines.
        num_held, sample = await asyncio.to_thread(self._sampled)
        try:
            num_alone = await self._alone(sample)
        except (UnavailableError, TimeoutError):
            self.num_bytes = None
            return
        num_sampled = sum(num_bytes for _, num_bytes in sample)
        self.num_bytes = num_held * num_alone // num_sampled if num_sampled else 0

    def _sampled(self) -> tuple[int, list[tuple[ChunkKey, int]]]:
        held = self.chunks.hottest_first()
        sample = held[:: max(1, math.ceil(len(held) / MAX_SAMPLED_CHUNKS))]
        return sum(num_bytes for _, num_bytes in held), sample

    async def _alone(self, sample: list[tuple[ChunkKey, int]]) -> int:
        """Return the bytes of chunks that no other instance has."""
        if self.remote is not None and sample:
            async with asyncio.timeout(self.timeout_s):
                there = await self.remote.batched_contains([key for key, _ in sample])
            sample = [chunk for chunk, is_there in zip(sample, there, strict=True) if not is_there]
        if not sample:
            return 0
        found = await self.holders.of([key.key.chunk_id() for key, _ in sample], MAX_SAMPLED_CHUNKS)
        if None in found:
            raise UnavailableError("lookup does not know the holders of chunks")
        return sum(
            num_bytes for (_, num_bytes), holders in zip(sample, found, strict=True) if not holders
        )
