"""Answers that come in pages."""

from __future__ import annotations

from lmcache_ctl.errors import CtlError
from lmcache_ctl.rest import RestService

MAX_PAGES = 1000


def all_tenants(service: RestService) -> list[str]:
    """The names of all pages.

    Raises:
        CtlError: The service does not answer, refuses, or there is no end of it.
    """
    names: list[str] = []
    after = ""
    for _ in range(MAX_PAGES):
        page = service.ask("GET", f"/v1/tenants{after}")
        names += page["tenants"]
        if page["next_after"] is None:
            return names
        after = f"?after={page['next_after']}"
    raise CtlError(f"more than {MAX_PAGES} pages of tenants")
