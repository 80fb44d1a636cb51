"""Who is told of the memory that clients are lent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_core.memory import MemoryObj


class ReservedExtents(Protocol):
    """Hears of reservations, so that the next start of the sidecar knows what clients may still be
    writing to.

    Attributes:
        needs_locks: Whether the next start uses the same memory, so that clients must hold the lock
            of their generation.
    """

    needs_locks: bool

    def reserved(self, memories: Sequence[MemoryObj]) -> bool:
        """Clients are about to be lent this memory; False: it must not be lent to them."""

    def flush(self) -> None:
        """What has happened so far is to outlive this process, even if it is killed next."""

    def abandoned(self, memories: Sequence[MemoryObj]) -> None:
        """This process ends while a client may still write to this memory: the references pass
        to the listener.
        """


class UnrecordedExtents:
    """Nothing is written down: the next start uses a new arena, and what is written to this one
    does no harm.
    """

    needs_locks = False

    def reserved(self, memories: Sequence[MemoryObj]) -> bool:
        """See `ReservedExtents.reserved`."""
        return True

    def flush(self) -> None:
        """See `ReservedExtents.flush`."""

    def abandoned(self, memories: Sequence[MemoryObj]) -> None:
        """See `ReservedExtents.abandoned`."""
        for memory in memories:
            memory.ref_count_down()
