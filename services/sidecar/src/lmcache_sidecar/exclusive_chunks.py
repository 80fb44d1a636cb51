"""Estimate of the bytes that only this sidecar holds, and that would be lost with it."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.base import StorageBackend
from lmcache_node.local_chunks import LocalChunks

from lmcache_sidecar.holders import Holders

MAX_SAMPLED_CHUNKS: Final = 32
"""Each that the remote tier does not have may cost one request to lookup."""
MEASURE_INTERVAL_S: Final = 60.0


class ExclusiveBytes:
    """Samples chunks at even distances from the hottest to the coldest, and asks who else has them.

    Args:
        chunks: What this sidecar holds.
        remote: The remote tier, without a breaker; None without one.
        holders: Tells which peers and storage servers have what.
        timeout_s: Longest wait for the remote tier.

    Attributes:
        num_bytes: The last estimate; None while lookup or the remote tier did not answer.
    """

    def __init__(
        self, chunks: LocalChunks, remote: StorageBackend | None, holders: Holders, timeout_s: float
    ) -> None:
        self._chunks = chunks
        self._remote = remote
        self._holders = holders
        self._timeout_s = timeout_s
        self.num_bytes: int | None = None

    async def measure(self) -> None:
        """Renew the estimate; to be repeated."""
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
        """Return the bytes of all chunks, and a sample of them."""
        held = self._chunks.hottest_first()
        return (
            sum(num_bytes for _, num_bytes in held),
            held[:: max(1, math.ceil(len(held) / MAX_SAMPLED_CHUNKS))],
        )

    async def _alone(self, sample: list[tuple[ChunkKey, int]]) -> int:
        """Return the bytes of those that no other instance has."""
        if self._remote is not None and sample:
            async with asyncio.timeout(self._timeout_s):
                there = await self._remote.batched_contains([key for key, _ in sample])
            sample = [chunk for chunk, is_there in zip(sample, there, strict=True) if not is_there]
        if not sample:
            return 0
        found = await self._holders.of(
            [key.key.chunk_id() for key, _ in sample], MAX_SAMPLED_CHUNKS
        )
        if None in found:
            raise UnavailableError("lookup does not know who holds what")
        return sum(
            num_bytes for (_, num_bytes), holders in zip(sample, found, strict=True) if not holders
        )
