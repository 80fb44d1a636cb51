"""How far a drain is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DrainState(StrEnum):
    """Where a sidecar is on its way to its end."""

    SERVING = "serving"
    WRITING = "writing"
    """No new stores; what was stored is written to the slower tiers."""
    HANDING_OVER = "handing_over"
    DONE = "done"


@dataclass(slots=True)
class DrainProgress:
    """Figures of one drain. `total` is the sum of the other four.

    Attributes:
        state: What it is about.
        total: Chunks that this sidecar holds.
        handed_over: Sent by this drain, and kept by who took them.
        already_elsewhere: Held by somebody else already.
        failed: Nobody took them, or they could not be read.
    """

    state: DrainState = DrainState.SERVING
    total: int = 0
    handed_over: int = 0
    already_elsewhere: int = 0
    failed: int = 0

    @property
    def left(self) -> int:
        """Chunks that were not dealt with, so far or before the time was over."""
        return self.total - self.handed_over - self.already_elsewhere - self.failed
