"""Background work."""

from __future__ import annotations

import logging

from lmcache_core.errors import UnavailableError

from lmcache_lookup.index import LookupIndex
from lmcache_lookup.metrics import LookupMetrics

logger = logging.getLogger(__name__)


async def sweep_once(index: LookupIndex, metrics: LookupMetrics) -> None:
    """Clear a few entries of ended leases; an index that is away has nothing to clear now."""
    try:
        metrics.swept_entries.inc(await index.sweep())
    except UnavailableError as exc:
        logger.debug("no sweep: %s", exc)
