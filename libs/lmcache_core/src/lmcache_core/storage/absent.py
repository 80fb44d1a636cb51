"""Tiers that cannot be had at the start: tried again until they can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.storage.base import StorageBackend

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0


class AbsentTiers:
    """Opens tiers, and goes on trying those that are not available.

    Args:
        on_open: Called on the loop with each that could be opened later; from then on it belongs to
            who is called.
    """

    def __init__(self, on_open: Callable[[StorageBackend], None]) -> None:
        self._on_open = on_open
        self._tasks = TaskSupervisor("absent-tiers")

    async def opens(self, tier: StorageBackend) -> bool:
        """Open it; False when it cannot be had now, and is tried again in the background.

        Raises:
            ConfigError: Its options are wrong, or another process owns its directory.
        """
        try:
            await tier.open()
        except UnavailableError as exc:
            logger.error("going on without the tier %s, which is tried again: %s", tier.name, exc)
            self._tasks.start(tier.name, self._open_later(tier))
            return False
        return True

    async def close(self) -> None:
        """Try no more. Idempotent."""
        await self._tasks.close()

    async def _open_later(self, tier: StorageBackend) -> None:
        pause_s = FIRST_RETRY_S
        last = ""
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            try:
                await tier.open()
            except (UnavailableError, ConfigError) as exc:
                if str(exc) != last:
                    last = str(exc)
                    logger.warning("the tier %s cannot be had yet: %s", tier.name, exc)
                continue
            logger.info("the tier %s can be had now", tier.name)
            self._on_open(tier)
            return
