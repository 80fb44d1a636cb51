"""Names of optional abilities in HELLO, over TCP and over the sidecar's socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_core.wire.messages import MAX_CAPABILITIES

LOSSY = "lossy"
SERDE_PREFIX = "serde:"
HANDOVER = "handover"
"""The client is a server that hands its chunks over before it ends."""
HELD = "held"
"""The client asks by HELD whether chunks of other tenants are there, before it gives up its own."""
CONTEXT = "context"
"""CONTEXT frames are understood."""
STAGE = "stage"
REJECT = "reject"
DESCRIBE = "describe"
"""The frames STAGE and DONE with tickets, REJECT, DESCRIBE are understood."""
ON_DEVICE = "on_device"
"""The client's KV is on a GPU: where the sidecar allows it, loads are checked by sample."""
LOCKS = "locks"
"""The client locks the sidecar's generation before it maps the arena: otherwise the next
sidecar cannot know what it writes to.
"""
SIDECAR_CAPABILITIES = (STAGE, REJECT, DESCRIBE, CONTEXT)
"""What a sidecar's socket understands beyond HELLO and loads and stores."""


@dataclass(frozen=True, slots=True)
class Accepts:
    """The records that a client can take; raw lossless ones it always can.

    Attributes:
        lossy: Also those that were encoded with loss, raw or not.
        serdes: Names of the serdes that it decodes.
    """

    lossy: bool = False
    serdes: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def said_by(cls, capabilities: Iterable[str]) -> Accepts:
        """Return what a client's capabilities say."""
        names = frozenset(capabilities)
        return cls(
            LOSSY in names,
            frozenset(
                name.removeprefix(SERDE_PREFIX) for name in names if name.startswith(SERDE_PREFIX)
            ),
        )

    def capabilities(self) -> tuple[str, ...]:
        """Return the capabilities that say it, in the same order every time."""
        names = ([LOSSY] if self.lossy else []) + [
            SERDE_PREFIX + serde for serde in sorted(self.serdes)
        ]
        return tuple(names[:MAX_CAPABILITIES])


ONLY_LOSSLESS = Accepts()
"""And raw: what every client can take."""
