"""The library's exceptions.

LMCacheError
|-- ConfigError          an option is unknown, impossible or contradicts another (also a ValueError)
|-- IdentityError        a key cannot be built or read (also a ValueError)
|-- RecordError          bytes that claim to be a record are not one, or are damaged
|-- SerdeError           bytes that claim to be an encoded tensor are not one, are damaged, or need tables that are not here
|-- ProtocolError        a peer broke the protocol; its connection is closed
|   `-- VersionError     no protocol version in common
|-- UnavailableError     a tier, service or peer cannot be reached or did not answer in time
|-- AuthenticationError  no, unknown or expired credentials
|-- CapacityError        a bound (memory, disk, queue, frame) is reached
|-- IntegrityError       an allocator's books do not balance: a bug of ours
`-- LayoutError          engine memory does not look as declared (also a ValueError)

A miss is not an exception: see `lmcache_core.storage.Miss`.
"""  # noqa: E501

from __future__ import annotations


class LMCacheError(Exception):
    """Root of all errors that this library raises on purpose."""


class ConfigError(LMCacheError, ValueError):
    """An option is unknown, impossible or contradicts another one. The text names option, value
    and fix.
    """


class IdentityError(LMCacheError, ValueError):
    """A key cannot be built from, or read out of, the given fields."""


class RecordError(LMCacheError):
    """Bytes that claim to be a record are not one, or are damaged.

    The text is the same when the same bytes are read again, and another one when they differ in
    what is wrong.

    Attributes:
        reason: One of `RecordReason`'s values, fit for a metric label.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class SerdeError(LMCacheError):
    """Bytes that claim to be an encoded tensor are not one, are damaged, or name tables that are
    not here.
    """


class ProtocolError(LMCacheError):
    """The other side broke the protocol; the connection is closed."""


class VersionError(ProtocolError):
    """The two sides share no protocol version."""


class UnavailableError(LMCacheError):
    """A tier, service or peer cannot be reached or did not answer within its deadline."""


class AuthenticationError(LMCacheError):
    """Credentials are missing, unknown or expired."""


class CapacityError(LMCacheError):
    """A bound (memory, disk, queue, frame) is reached."""


class IntegrityError(LMCacheError):
    """An allocator's books do not balance: a bug of ours, never of the caller."""


class LayoutError(LMCacheError, ValueError):
    """Engine memory does not have the declared shape, dtype or device."""
