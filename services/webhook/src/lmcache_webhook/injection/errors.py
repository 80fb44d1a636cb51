"""Why a pod stays as it is."""

from __future__ import annotations

from lmcache_core.errors import LMCacheError


class DeclinedError(LMCacheError):
    """Nothing is injected into this pod; the text says why and what to change, in one sentence."""
