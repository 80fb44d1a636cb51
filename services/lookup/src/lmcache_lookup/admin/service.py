"""Figures for status pages."""

from __future__ import annotations

from lmcache_core.errors import UnavailableError

from lmcache_lookup.admin.schemas import StatsBody
from lmcache_lookup.index import LookupIndex


async def read_stats(index: LookupIndex, tenant: str) -> StatsBody:
    """Figures of one tenant; an index that is away is part of the answer."""
    try:
        stats = await index.stats(tenant)
    except UnavailableError:
        return StatsBody(index=index.name, degraded=True, num_chunks=None, num_instances=None)
    return StatsBody(index=index.name, degraded=False, num_chunks=stats.num_chunks, num_instances=stats.num_instances)
