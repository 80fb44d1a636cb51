"""Figures for status pages, and whose figures a caller may see."""

from __future__ import annotations

from lmcache_core.errors import UnavailableError
from lmcache_core.security import Principal
from lmcache_servicekit.errors import PermissionDeniedError

from lmcache_lookup.admin.schemas import StatsAnswer, TenantsAnswer
from lmcache_lookup.index import LookupIndex


def tenant_for(caller: Principal, asked: str | None) -> str:
    """The tenant that a call is about.

    Raises:
        PermissionDeniedError: It is another one than the caller's, and the caller's token has not
            the role `admin`.
    """
    if asked is None or asked == caller.tenant:
        return caller.tenant
    if caller.role != "admin":
        raise PermissionDeniedError("asking about another tenant needs a token with the role admin")
    return asked


async def read_stats(index: LookupIndex, tenant: str) -> StatsAnswer:
    """Figures of one tenant; an index that is away is part of the answer."""
    try:
        stats = await index.stats(tenant)
    except UnavailableError:
        return StatsAnswer(index.name, True, None, None)
    return StatsAnswer(index.name, False, stats.num_chunks, stats.num_instances)


async def read_tenants(index: LookupIndex, after: str, limit: int) -> TenantsAnswer:
    """At most `limit` tenants whose names come behind `after`.

    Raises:
        UnavailableError: The index is away.
    """
    behind = [tenant for tenant in await index.tenants() if tenant > after]
    page = behind[:limit]
    return TenantsAnswer(page, page[-1] if len(behind) > limit else None)
