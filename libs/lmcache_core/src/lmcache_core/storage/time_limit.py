"""The caller's deadline, inside a tier: the work ends, and what it has brought so far is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """How long chunks may be waited for. On the event loop only.

    Attributes:
        deadline: On the loop's clock.
        recompute_s: What computing one chunk anew costs; None when that is not known.
    """

    deadline: float
    recompute_s: float | None = None

    def left_s(self, num_chunks: int) -> float:
        """Seconds that so many chunks are worth, and that are left; not positive when there are
        none.
        """
        left_s = self.deadline - asyncio.get_running_loop().time()
        return left_s if self.recompute_s is None else min(left_s, self.recompute_s * num_chunks)


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
