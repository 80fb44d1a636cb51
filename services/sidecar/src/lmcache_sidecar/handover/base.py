"""Who takes chunks from a sidecar that ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk


class NotWelcomeError(UnavailableError):
    """Who was asked takes nothing from us, and will not do so later."""


class Taker(Protocol):
    """One place that chunks are handed to. Calls raise `UnavailableError` when it cannot be
    reached; they may be cancelled.
    """

    @property
    def name(self) -> str:
        """Unlike that of any other taker."""

    async def has(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of them need not be sent: they are there, or somewhere else where they will be
        found.
        """

    async def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Send chunks (borrowed). True: it holds the whole chunk now."""


class TakerSource(Protocol):
    """Where takers come from."""

    async def takers(self) -> Sequence[Taker]:
        """Those there are now. Raises `UnavailableError` when that cannot be said."""

    async def close(self) -> None:
        """End their connections. Idempotent."""
