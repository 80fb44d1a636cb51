"""A tier that is asked again when it could not be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """How often and how long.

    Attributes:
        max_tries: Calls of the backend for one call, the first included.
        pause_s: Wait before the second try; doubles with each further one.
        pause_cap_s: Longest wait between two tries.
        max_total_s: A call ends after that long, whatever its tries do; a caller who has less time is done earlier.
    """

    max_tries: int = 3
    pause_s: float = 0.05
    pause_cap_s: float = 0.5
    max_total_s: float = 5.0


class RetryBackend(WrapperBackend):
    """Repeats calls that end with `UnavailableError`: contains, get, and put, since to put a chunk twice changes nothing.

    Removals are not repeated: a second one could no longer tell how many chunks there were.

    Args:
        backend: What is wrapped.
        options: How often and how long.
    """

    def __init__(self, backend: StorageBackend, options: RetryOptions | None = None) -> None:
        super().__init__(backend)
        self._options = options or RetryOptions()
        self._num_retries = 0

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        return await self._repeat(lambda left_s: self._backend.batched_contains(keys))

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """See `StorageBackend.batched_get`. Every try has what is left of `timeout_s`."""
        return await self._repeat(lambda left_s: self._backend.batched_get(keys, allocate, left_s), timeout_s)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        return await self._repeat(lambda left_s: self._backend.batched_put(chunks))

    def stats(self) -> dict[str, int]:
        """The backend's figures, and `retries`."""
        return self._backend.stats() | {"retries": self._num_retries}

    async def _repeat(self, call: Callable[[float | None], Awaitable[T]], timeout_s: float | None = None) -> T:
        """The first answer; the last failure when there is none.

        Args:
            call: Given the seconds that its caller still has, None for no limit of the caller's.
            timeout_s: The caller's limit: no pause goes beyond it.
        """
        clock = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else clock() + timeout_s
        pause_s = self._options.pause_s
        try:
            async with asyncio.timeout(self._options.max_total_s) as limit:
                for _ in range(self._options.max_tries - 1):
                    try:
                        return await call(None if deadline is None else deadline - clock())
                    except UnavailableError:
                        if deadline is not None and clock() + pause_s >= deadline:
                            raise
                    self._num_retries += 1
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, self._options.pause_cap_s)
                return await call(None if deadline is None else deadline - clock())
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise UnavailableError(f"tier {self.name}: no answer within {self._options.max_total_s} s") from exc
