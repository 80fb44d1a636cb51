"""Memory that one client fills: lent to it until it commits, aborts or goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmcache_core.memory import MemoryObj
from lmcache_core.memory.free_list import extent_bytes
from lmcache_core.wire.messages import Extent

from lmcache_sidecar.socket.context import ReservationRoom, SessionContext

MAX_RESERVATIONS = 16384
RESERVED_SHARE = 2
"""Reservations of one client may hold one part in this many of the arena."""


class Reservations:
    """The reservations of one client; each holds a reference.

    Args:
        context: Where memory comes from, and who hears of what is lent.
        room: What this and other clients may hold together.
        ids: Where the names of reservations come from.

    Attributes:
        num_bytes: What they hold of the arena.
    """

    def __init__(self, context: SessionContext, room: ReservationRoom, ids: Iterator[int]) -> None:
        self._stack = context.stack
        self._extents = context.extents
        self._room = room
        self._max_bytes = context.arena.size // RESERVED_SHARE
        self._ids = ids
        self._memories: dict[int, MemoryObj] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._memories)

    def add(self, sizes: Sequence[int]) -> list[Extent | None]:
        """Lend memory; None where there is no room."""
        lent = [self._add_one(size) for size in sizes]
        handles = [extent.id for extent in lent if extent is not None]
        if handles and not self._extents.reserved([self._memories[name] for name in handles]):
            self.release(handles)
            return [None] * len(lent)
        return lent

    def take(self, handle: int) -> MemoryObj | None:
        """End a reservation; its reference passes to the caller. None for one that is not known."""
        memory = self._memories.pop(handle, None)
        if memory is not None:
            self._uncount(memory.metadata.phy_size)
        return memory

    def release(self, handles: Sequence[int]) -> None:
        """End reservations unused; unknown ones are passed over."""
        for handle in handles:
            memory = self.take(handle)
            if memory is not None:
                memory.ref_count_down()

    def abandon(self) -> None:
        """The sidecar ends while the client may still be writing: nobody else gets that memory."""
        memories = self._clear()
        if memories:
            self._extents.abandoned(memories)

    def close(self) -> None:
        """Give everything back: the client is gone."""
        for memory in self._clear():
            memory.ref_count_down()

    def _add_one(self, size: int) -> Extent | None:
        taken = extent_bytes(size)
        if (
            len(self._memories) >= MAX_RESERVATIONS
            or self.num_bytes + taken > self._max_bytes
            or not self._room.take(taken)
        ):
            return None
        self.num_bytes += taken
        memory = self._stack.allocate(size)
        if memory is None:
            self._uncount(taken)
            return None
        handle = next(self._ids)
        self._memories[handle] = memory
        return Extent(handle, memory.metadata.address, size)

    def _uncount(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._room.give(num_bytes)

    def _clear(self) -> list[MemoryObj]:
        memories = list(self._memories.values())
        self._memories.clear()
        self._uncount(self.num_bytes)
        return memories
