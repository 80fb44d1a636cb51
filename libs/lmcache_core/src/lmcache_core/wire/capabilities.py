"""What a client takes, as names in HELLO: over TCP, and over the sidecar's socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_core.wire.messages import MAX_CAPABILITIES

LOSSY = "lossy"
SERDE_PREFIX = "serde:"
ON_DEVICE = "on_device"
"""The client's KV is on a GPU: if the sidecar allows it, only a sample of loads is verified."""
CHUNK_BYTES_PREFIX = "chunk_bytes:"
"""Before the size of the largest payload that the client can use, decoded, in decimal digits: the
sidecar reads no larger record from a slower tier for it.
"""
MAX_CHUNK_BYTES_DIGITS = 15
ROLE_PREFIX = "role:"
"""Before vLLM's `kv_role` of the engine, for status pages."""


@dataclass(frozen=True, slots=True)
class Accepts:
    """The records that a client accepts in addition to raw lossless ones.

    Attributes:
        lossy: Also records that were encoded with loss, raw or not.
        serdes: Names of the serdes that it decodes.
    """

    lossy: bool = False
    serdes: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def said_by(cls, capabilities: Iterable[str]) -> Accepts:
        """Return what a client's capabilities express."""
        names = frozenset(capabilities)
        return cls(
            LOSSY in names,
            frozenset(
                name.removeprefix(SERDE_PREFIX) for name in names if name.startswith(SERDE_PREFIX)
            ),
        )

    def capabilities(self) -> tuple[str, ...]:
        """Return the capabilities that express this, always in the same order."""
        names = ([LOSSY] if self.lossy else []) + [
            SERDE_PREFIX + serde for serde in sorted(self.serdes)
        ]
        return tuple(names[:MAX_CAPABILITIES])


def chunk_bytes_said_by(capabilities: Iterable[str]) -> int | None:
    """Return the size of the largest payload that a client can use; None if it does not say."""
    for name in capabilities:
        digits = name.removeprefix(CHUNK_BYTES_PREFIX)
        if digits != name and digits.isascii() and digits.isdecimal():
            return int(digits) if len(digits) <= MAX_CHUNK_BYTES_DIGITS else None
    return None


def role_said_by(capabilities: Iterable[str]) -> str:
    """Return vLLM's `kv_role` of a client; "" if it does not say."""
    roles = (
        name.removeprefix(ROLE_PREFIX) for name in capabilities if name.startswith(ROLE_PREFIX)
    )
    return next(roles, "")


ONLY_LOSSLESS = Accepts()
"""And raw, which every client accepts."""
