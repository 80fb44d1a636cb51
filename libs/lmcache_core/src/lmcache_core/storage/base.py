"""The interface of a tier, and the values that pass through it. No torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result

OnRemoved = Callable[[ChunkKey], None]
IsUnwanted = Callable[[ChunkKey], bool]
"""Tells which chunks are being removed."""


class StorageBackend(ABC):
    """One tier. Every call is batched; results stand in the order of the keys.

    A call never raises for a chunk that is missing, damaged or does not fit: those are values. It
    raises `UnavailableError` when the whole tier cannot be reached. Cancellation is safe at any
    await: memory allocated so far is given back.
    """

    name: str
    wrapped: StorageBackend | None = None
    """The tier inside, of one that adds something to another."""

    @property
    def is_bypassed(self) -> bool:
        """Return whether calls, or writes alone, are answered without asking the device."""
        return False

    def num_worth(self, num_chunks: int, limit_s: float, recompute_s: float | None = None) -> int:
        """Return how many chunks, from the first, a read should ask for; all where that is unknown.

        Args:
            num_chunks: How many are wanted.
            limit_s: The read must be over by then.
            recompute_s: What computing one chunk instead costs; a read that costs more than
                computing what it brings is worth nothing.
        """
        return num_chunks

    @abstractmethod
    async def open(self) -> None:
        """Do the I/O that the constructor must not do. Raises `UnavailableError` or
        `ConfigError`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop background work and join it. Idempotent."""

    @abstractmethod
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which of them a `batched_get` would find now."""

    @abstractmethod
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks, each verified (key, head, digest). The caller owns every chunk returned.

        Args:
            keys: Their names.
            allocate: Where payloads go.
            timeout_s: What has not come by then is a miss with reason `deadline`; what has come is
                returned. None: the tier's own limit.
        """

    @abstractmethod
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Keep chunks (borrowed: a backend that keeps the memory takes its own reference). True:
        kept, or was there already.

        When it returns, what is True is visible to `batched_contains` and complete.
        """

    @abstractmethod
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that were there."""

    @abstractmethod
    async def clear(self, tenant: str | None = None) -> int:
        """Forget everything (of that tenant); the number of chunks."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return figures for status pages: `num_chunks`, `used_bytes`, `capacity_bytes` and what
        else the tier counts.
        """


@runtime_checkable
class ListsKeys(Protocol):
    """Ability: a tier that knows what it holds."""

    def keys(self) -> list[ChunkKey]:
        """Return the names of all chunks held now."""

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Return name and size (whole record, bytes) of every chunk held now."""


def lister_of(backend: StorageBackend) -> ListsKeys | None:
    """Return what can tell which chunks this tier holds, the tier itself or one inside it; None
    when it does not know.
    """
    while backend.wrapped is not None:
        backend = backend.wrapped
    return backend if isinstance(backend, ListsKeys) else None


@asynccontextmanager
async def caller_limit(timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the work inside after `timeout_s` seconds (None: never) and go on behind it.

    Yields:
        What tells, by `expired()`, whether the time was over before the work was done.
    """
    limit = asyncio.timeout(None if timeout_s is None else max(0.0, timeout_s))
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
