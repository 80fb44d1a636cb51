"""Answers that come in pages."""

from __future__ import annotations

from lmcache_ctl.cluster.services import Kind
from lmcache_ctl.errors import CtlError
from lmcache_ctl.reach import Reach

MAX_PAGES = 1000


def all_tenants(reach: Reach) -> list[str]:
    """The names of all pages.

    Raises:
        CtlError: The service does not answer, refuses, or there is no end of it.
    """
    names: list[str] = []
    after = ""
    for _ in range(MAX_PAGES):
        page = reach.ask(Kind.LOOKUP, "GET", f"/v1/tenants{after}")
        names += page["tenants"]
        if page["next_after"] is None:
            return names
        after = f"?after={page['next_after']}"
    raise CtlError(f"more than {MAX_PAGES} pages of tenants")
