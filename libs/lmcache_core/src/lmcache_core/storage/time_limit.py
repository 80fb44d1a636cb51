"""The caller's deadline, inside a tier: the work ends, and what it has brought so far is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
