"""Opens tiers, and retries those that are not available."""

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


class TierReconnector:
    """Opens tiers, and retries in the background.

    Args:
        on_open: Called on the loop with each tier that was opened later, which belongs to the
            callee from then on.
    """

    def __init__(self, on_open: Callable[[StorageBackend], None]) -> None:
        self._on_open = on_open
        self._tasks = TaskSupervisor("reconnect-tiers")

    async def open(self, tier: StorageBackend) -> bool:
        """Open a tier; False when it is unavailable now, and retried.

        Raises:
            ConfigError: Its options are wrong, or another process owns its directory.
        """
        try:
            await tier.open()
        except UnavailableError as exc:
            logger.error("tier unavailable, retrying: tier=%s error=%s", tier.name, exc)
            self._tasks.start(tier.name, self._open_later(tier))
            return False
        return True

    async def close(self) -> None:
        """Stop retrying. Idempotent."""
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
                    logger.warning("tier still unavailable: tier=%s error=%s", tier.name, exc)
                continue
            logger.info("tier available: tier=%s", tier.name)
            self._on_open(tier)
            return
