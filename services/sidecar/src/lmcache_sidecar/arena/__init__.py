"""The arena across restarts of the sidecar: what is lent and kept is written down, and what is
whole is served again (ADR 9).
"""

from lmcache_sidecar.arena.extents import ReservedExtents, UnrecordedExtents
from lmcache_sidecar.arena.opening import OpenedArena, open_arena
from lmcache_sidecar.arena.owner import ArenaOwner, ArenaStatus
from lmcache_sidecar.arena.recovery import RecoveryProgress

__all__ = [
    "ArenaOwner",
    "ArenaStatus",
    "OpenedArena",
    "RecoveryProgress",
    "ReservedExtents",
    "UnrecordedExtents",
    "open_arena",
]
