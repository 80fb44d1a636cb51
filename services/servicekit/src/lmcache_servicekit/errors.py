"""Errors that services raise beyond `lmcache_core.errors`.

LMCacheError
|-- NotFoundError          the named resource does not exist for the caller's tenant
|-- ConflictError          the request contradicts the resource's current state
|-- PermissionDeniedError  the caller is known, but its role does not allow this
|-- CapacityError
|   `-- ThrottledError     the caller has too much in flight, or exceeds its rate; it may retry
`-- UnavailableError
    `-- StoreRefusedError  a store answered, and refused this call

They know nothing of HTTP: `lmcache_servicekit.problems` maps them.
"""

from __future__ import annotations

from lmcache_core.errors import CapacityError, LMCacheError, UnavailableError


class NotFoundError(LMCacheError):
    """The named resource does not exist for the caller's tenant."""


class ConflictError(LMCacheError):
    """The request contradicts the current state of the resource."""


class PermissionDeniedError(LMCacheError):
    """The caller is authenticated, but its role does not allow this."""


class ThrottledError(CapacityError):
    """The caller has too much in flight, or exceeds its rate; it may retry later.

    Args:
        retry_after_s: When to retry; None: soon.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreRefusedError(UnavailableError):
    """A store answered, and refused: it is full, or read-only. Other calls may succeed."""
