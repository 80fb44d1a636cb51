"""Several pieces of work side by side, of which none outlives the call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from lmcache_core.concurrency.supervisor import cancel_and_join


async def run_together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; the first failure, or cancellation, ends all of them.

    How many there are, and how long they take, the caller bounds.

    Raises:
        BaseException: What the first of them raised that failed. When it is raised, all of them
            have ended, but for those that ignore their cancellation: see `cancel_and_join`.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_join(tasks)
