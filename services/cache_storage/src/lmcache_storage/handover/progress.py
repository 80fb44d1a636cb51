"""How far a drain is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DrainState(StrEnum):
    """Where a server is on its way to its end."""

    SERVING = "serving"
    WRITING = "writing"
    """No new chunks; those taken before are written to the disk."""
    HANDING_OVER = "handing_over"
    DONE = "done"


@dataclass(slots=True)
class Moved:
    """Figures of one move. `total` is the sum of the other four.

    Attributes:
        total: Chunks that were to move.
        handed_over: Sent, and kept by who took them.
        already_elsewhere: There already.
        failed: Could not be read, or nobody had room.
    """

    total: int = 0
    handed_over: int = 0
    already_elsewhere: int = 0
    failed: int = 0

    @property
    def left(self) -> int:
        """Chunks that were not dealt with, so far or before the time was over."""
        return self.total - self.handed_over - self.already_elsewhere - self.failed
