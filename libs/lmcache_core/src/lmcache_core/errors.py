"""The library's exceptions.

LMCacheError
|-- ConfigError          an option is unknown, impossible or contradicts another (also a ValueError)
|-- IdentityError        a key cannot be built or read (also a ValueError)
|-- RecordError          bytes that claim to be a record are invalid or damaged
|-- SerdeError           bytes that claim to be an encoded tensor are invalid or need other tables
|-- ProtocolError        a peer violated the protocol; its connection is closed
|   `-- VersionError     no common protocol version
|-- UnavailableError     a tier, service or peer cannot be reached or did not answer in time
|-- AuthenticationError  missing, unknown or expired credentials
|-- CapacityError        a bound (memory, disk, queue, frame) is reached
|-- IntegrityError       an allocator's accounting does not add up: a bug of ours
`-- LayoutError          engine memory does not look as declared (also a ValueError)

A miss is not an exception: see `lmcache_core.storage.Miss`.
"""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return text with characters that are not printable, such as line ends, escaped: text of
    others must not look like lines of ours in a log.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class LMCacheError(Exception):
    """Root of all errors that this library raises on purpose. Its text, which may quote a server,
    is one line.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(LMCacheError, ValueError):
    """An option is unknown, impossible or contradicts another one. The text names option, value
    and fix, and may have several lines.
    """

    def __str__(self) -> str:
        return ValueError.__str__(self)


class IdentityError(LMCacheError, ValueError):
    """A key cannot be built from, or read out of, the given fields."""


class RecordError(LMCacheError):
    """Bytes that claim to be a record are invalid or damaged.

    The text is the same for repeated reads of the same bytes, and differs if the error differs.

    Attributes:
        reason: One of `RecordReason`'s values, suitable as a metric label.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class SerdeError(LMCacheError):
    """Bytes that claim to be an encoded tensor are invalid, damaged, or name tables that are not
    here.
    """


class ProtocolError(LMCacheError):
    """The other side violated the protocol; the connection is closed."""


class VersionError(ProtocolError):
    """The two sides share no protocol version."""


class UnavailableError(LMCacheError):
    """A tier, service or peer cannot be reached or did not answer within its deadline."""


class AuthenticationError(LMCacheError):
    """Credentials are missing, unknown or expired."""


class CapacityError(LMCacheError):
    """A bound (memory, disk, queue, frame) is reached."""


class IntegrityError(LMCacheError):
    """An allocator's accounting does not add up: a bug of ours, never of the caller."""


class LayoutError(LMCacheError, ValueError):
    """Engine memory does not have the declared shape, dtype or device."""
