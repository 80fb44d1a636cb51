"""Chunks that others are about to store: a read waits for them, for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Final

from lmcache_core.keys import ChunkKey

EXPECTED_S: Final = 0.1
"""Longest wait for them: a client that is alive takes less, and one that hangs costs no more."""
EXPECTED_FROM: Final[ContextVar[str]] = ContextVar("lmcache_expected_from", default="")
"""Who has the chunks that a read is about, or will have them: the id or host of an instance, as its
client was told; "" if unknown.
"""


class ExpectedChunks:
    """Names of chunks that clients here are writing, each from the reservation of its memory until
    it is stored or given up. For one event loop.
    """

    def __init__(self) -> None:
        self._events: dict[ChunkKey, asyncio.Event | None] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._events

    def __len__(self) -> int:
        return len(self._events)

    def add(self, key: ChunkKey) -> None:
        """Expect a chunk. Of two clients that write the same one, the first to end ends both."""
        self._events.setdefault(key, None)

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """Expect these chunks no longer: they are stored, or will not be."""
        for key in keys:
            event = self._events.pop(key, None)
            if event is not None:
                event.set()

    async def wait(self, keys: Sequence[ChunkKey], timeout_s: float) -> bool:
        """Wait for those of these chunks that are expected, at most `EXPECTED_S`; False if there
        were none.
        """
        wanted = [key for key in keys if key in self._events]
        if not wanted:
            return False
        try:
            async with asyncio.timeout(min(timeout_s, EXPECTED_S)):
                for key in wanted:
                    if key not in self._events:
                        continue
                    event = self._events[key]
                    if event is None:
                        event = self._events[key] = asyncio.Event()
                    await event.wait()
        except TimeoutError:
            pass
        return True
