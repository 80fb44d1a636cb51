"""The fixed headers that LMCache clients send and read, and how violations are classified. They
contain no version, so each listener speaks one dialect.

Source: `docs/protocols.md`, "LMCache compatibility". Vectors: `tests/contract/lmcache_compat`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final

from lmcache_core.errors import ProtocolError

KEY_BYTES: Final = 150
NUM_ABOUT: Final = 6
"""Numbers that describe a value: format, dtype, four dimensions."""
CODE_FOUND: Final = 200
CODE_MISSING: Final = 400

About = tuple[int, int, int, int, int, int]
"""Format, dtype and four dimensions of a value, as numbered by its client. They are meaningful only
to clients of its release.
"""

NO_VALUE: Final[About] = (1, 2, 0, 0, 0, 0)
"""Description in a reply without a value: numbers that every release knows, since some look them up
before the code.
"""


class CloseReason(StrEnum):
    """Why a connection was closed, other than that its client disconnected or the service shut
    down. Each reason is counted.
    """

    TOO_MANY = "too_many"
    COMMAND = "command"
    KEY = "key"
    LENGTH = "length"
    SHORT = "short"
    SLOW = "slow"
    IDLE = "idle"


class CompatRefusedError(ProtocolError):
    """The client violated the protocol or a bound: nothing that follows on its connection can be
    interpreted.

    Attributes:
        reason: Suitable as a metric label.
    """

    def __init__(self, reason: CloseReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class CompatCommand(IntEnum):
    """Commands that are answered. LIST (4) is not: no release has ever answered it."""

    PUT = 1
    GET = 2
    EXIST = 3
    HEALTH = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        key: The key without its padding; "" for HEALTH.
        num_bytes: Length of the value that follows; 0 except for PUT.
    """

    command: CompatCommand
    key: str
    num_bytes: int
    about: About


@dataclass(frozen=True, slots=True)
class Dialect:
    """The headers of one range of releases: little-endian int32 and a padded key.

    Attributes:
        name: Name in the settings.
        request: CompatCommand, length, format, dtype, (location,) four dimensions, key.
        reply: Code, length, format, dtype, four dimensions (, location).
        has_location: Whether the request contains a number for a tier of the client, which is
            ignored.
    """

    name: str
    request: struct.Struct
    reply: struct.Struct
    has_location: bool

    def parse(self, data: bytes | bytearray, max_value_bytes: int) -> Request:
        """Parse a request's header.

        Args:
            data: Exactly `request.size` bytes.

        Raises:
            CompatRefusedError: It is malformed, or announces a value that is not accepted.
        """
        command, num_bytes, fmt, dtype, *rest = self.request.unpack(data)
        dims, padded = rest[-5:-1], rest[-1]
        try:
            known = CompatCommand(command)
        except ValueError:
            raise CompatRefusedError(CloseReason.COMMAND, f"command {command} is unknown") from None
        if known is not CompatCommand.PUT:
            num_bytes = 0  # the field is meaningless: nothing follows
        elif not 0 < num_bytes <= max_value_bytes:
            raise CompatRefusedError(
                CloseReason.LENGTH,
                f"a value of {num_bytes} bytes; must be 1 to {max_value_bytes}",
            )
        return Request(
            known,
            "" if known is CompatCommand.HEALTH else _key(padded),
            num_bytes,
            (fmt, dtype, *dims),
        )

    def found(self, num_bytes: int = 0, about: About = NO_VALUE, code: int = CODE_FOUND) -> bytes:
        """Return the header of the reply that the value exists, with its length; the value follows
        if `num_bytes` is not 0.
        """
        return self.reply.pack(code, num_bytes, *about, *((0,) if self.has_location else ()))

    def missing(self) -> bytes:
        """Return the reply that the value does not exist."""
        return self.found(code=CODE_MISSING)


DIALECTS: Final = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            Dialect("v0.2", struct.Struct(f"<8i{KEY_BYTES}s"), struct.Struct("<8i"), False),
            Dialect("v0.3+", struct.Struct(f"<9i{KEY_BYTES}s"), struct.Struct("<9i"), True),
        )
    }
)
"""Dialects by name. A release after 0.3 with other headers will be a dialect of its own."""


def _key(padded: bytes) -> str:
    try:
        key = padded.decode("utf-8").strip(" ")
    except UnicodeDecodeError:
        raise CompatRefusedError(CloseReason.KEY, "the key is not UTF-8") from None
    if not key:
        raise CompatRefusedError(CloseReason.KEY, "the key is empty")
    if not key.isprintable():
        raise CompatRefusedError(
            CloseReason.KEY,
            "the key has unprintable characters; set lmcache_compat_dialect to that of this client",
        )
    return key
