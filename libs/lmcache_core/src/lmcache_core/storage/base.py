"""The interface of a tier, and the values that pass through it. No torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result

OnRemoved = Callable[[ChunkKey], None]
IsUnwanted = Callable[[ChunkKey], bool]
"""Returns whether a chunk is being removed."""


class StorageBackend(ABC):
    """One tier. Every call is batched; results are in the order of the keys.

    A chunk that is missing, damaged or too large is reported as a value, never raised. A call
    raises `UnavailableError` only when the whole tier cannot be reached. Cancellation is safe at
    any await: memory allocated so far is released.
    """

    name: str
    wrapped: StorageBackend | None = None
    """The wrapped tier, if this one decorates another."""

    @property
    def is_bypassed(self) -> bool:
        """Return whether calls, or only writes, are answered without touching the device."""
        return False

    @property
    def num_written(self) -> int | None:
        """Return how many chunks the device has taken so far; None if the tier asks its device for
        every answer. A tier that counts them knows what it holds without its device.
        """
        return None if self.wrapped is None else self.wrapped.num_written

    @property
    def is_asked_first(self) -> bool:
        """Return whether to ask for chunks before they are put, since putting one that is there
        would cost more than the question. The put of any other tier recognizes such a chunk itself.
        """
        return self.num_written is None if self.wrapped is None else self.wrapped.is_asked_first

    @property
    def keeps_tails(self) -> bool:
        """Return whether it evicts tails before all other chunks; other tiers are not given any."""
        return self.wrapped is not None and self.wrapped.keeps_tails

    def num_worth(self, num_chunks: int, limit_s: float, recompute_s: float | None = None) -> int:
        """Return how many chunks, from the first, a read should ask for; all if the cost is
        unknown.

        Args:
            limit_s: Time within which the read must finish.
            recompute_s: Cost of computing one chunk instead. A read that costs more than
                recomputing what it brings is not worth making.
        """
        return num_chunks

    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool] | None:
        """Return the answer of `batched_contains`, from any thread and without I/O; None if the
        tier must be asked on its loop.
        """
        return None

    @abstractmethod
    async def open(self) -> None:
        """Do the I/O that the constructor must not do.

        Raises:
            UnavailableError: The tier cannot be reached.
            ConfigError: An option is wrong.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop background work and join it. Idempotent."""

    @abstractmethod
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which of these chunks a `batched_get` would find now."""

    @abstractmethod
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks and verify each (key, head, digest). The caller owns every chunk returned.

        Args:
            timeout_s: Chunks that have not arrived by then are misses with reason `deadline`; the
                others are returned. None: the tier's own limit.
        """

    @abstractmethod
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks and return True for each that is stored now or was before.

        Chunks are borrowed: a backend that keeps the memory takes its own reference. On return,
        every chunk reported as True is complete and visible to `batched_contains`.
        """

    @abstractmethod
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks and return how many were there."""

    @abstractmethod
    async def clear(self, tenant: str | None = None) -> int:
        """Remove everything (of that tenant) and return the number of chunks."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return figures for status pages: `num_chunks`, `used_bytes`, `capacity_bytes` and the
        tier's own counters.
        """


@asynccontextmanager
async def caller_limit(timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the body after `timeout_s` seconds (None: never) and continue after the block.

    Yields:
        The timeout; its `expired()` tells whether the body was cut short.
    """
    limit = asyncio.timeout(None if timeout_s is None else max(0.0, timeout_s))
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
