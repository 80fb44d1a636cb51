"""The mover: a process that reads from and writes to other machines for a sidecar, into the
sidecar's arena, through libraries that cannot be trusted to stop.

This package is the sidecar's side. No torch.
"""

from __future__ import annotations

from lmcache_core.mover.client import MoverClient, Piece
from lmcache_core.mover.messages import Attach, Attached

__all__ = ["Attach", "Attached", "MoverClient", "Piece"]
