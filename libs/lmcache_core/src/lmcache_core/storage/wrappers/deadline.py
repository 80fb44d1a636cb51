"""A tier that answers in time: what has not come by then is a miss."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DeadlineBackend(WrapperBackend):
    """Cancels calls of the backend inside that last longer than `timeout_s`; cancelled, it gives its memory back.

    `clear` has no deadline: nothing waits for it. One log line when calls begin to be late, one when they are in time again.

    Args:
        backend: What is wrapped.
        timeout_s: Deadline of a call.
    """

    def __init__(self, backend: StorageBackend, timeout_s: float) -> None:
        super().__init__(backend)
        self._timeout_s = timeout_s
        self._is_late = False
        self._num_late = 0

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        return await self._in_time(self._backend.batched_contains(keys), [False] * len(keys))

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        late: list[Result] = [Miss(MissReason.DEADLINE)] * len(keys)
        return await self._in_time(self._backend.batched_get(keys, allocate, timeout_s), late)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        return await self._in_time(self._backend.batched_put(chunks), [False] * len(chunks))

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        return await self._in_time(self._backend.batched_remove(keys), 0)

    def stats(self) -> dict[str, int]:
        """The backend's figures, and `late_calls`."""
        return self._backend.stats() | {"late_calls": self._num_late}

    async def _in_time(self, work: Awaitable[T], otherwise: T) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                answer = await work
        except TimeoutError:
            if not limit.expired():
                raise
            self._num_late += 1
            self._note(is_late=True)
            return otherwise
        self._note(is_late=False)
        return answer

    def _note(self, is_late: bool) -> None:
        if is_late and not self._is_late:
            logger.warning("tier %s does not answer within %.3f s", self.name, self._timeout_s)
        elif self._is_late and not is_late:
            logger.info("tier %s answers in time again; %d calls were late so far", self.name, self._num_late)
        self._is_late = is_late
