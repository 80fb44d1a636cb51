"""Why a connection of an LMCache client is closed."""

from __future__ import annotations

from enum import StrEnum

from lmcache_core.errors import ProtocolError


class CloseReason(StrEnum):
    """Why a connection was closed, other than that its client went or the service ends. Each is
    counted.
    """

    TOO_MANY = "too_many"
    COMMAND = "command"
    KEY = "key"
    LENGTH = "length"
    SHORT = "short"
    SLOW = "slow"
    IDLE = "idle"


class CompatRefusedError(ProtocolError):
    """The client broke the protocol or a bound: nothing that follows on its connection can be
    understood.

    Attributes:
        reason: Fit for a metric label.
    """

    def __init__(self, reason: CloseReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
