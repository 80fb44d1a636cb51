"""The arena of this process, from its first byte to what it leaves to the next."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.memory import ArenaAllocator, MemoryObj, SharedArena
from lmcache_core.memory.shared import unlink_shared_arena
from lmcache_core.storage.hot import LocalCPUBackend, OnKept
from lmcache_core.storage.stack import StackListener
from lmcache_core.telemetry import Counters

from lmcache_sidecar.arena.entries import Committed
from lmcache_sidecar.arena.extents import ReservedExtents, UnrecordedExtents
from lmcache_sidecar.arena.generations import EarlierGenerations
from lmcache_sidecar.arena.opening import OpenedArena
from lmcache_sidecar.arena.recovery import ArenaRecovery, RecoveryProgress

LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ArenaStatus:
    """What there is to tell of it.

    Attributes:
        is_recorded: Whether what is in it now will outlive this process.
        lent_bytes: What clients of earlier starts may still write to; used by nobody.
        recovery: How far the check of what an earlier start has left is.
    """

    is_recorded: bool
    lent_bytes: int
    recovery: RecoveryProgress


class ArenaKeeper:
    """Owns the arena, what is written down of it, and what an earlier start has left in it.

    Args:
        opened: The arena; belongs to this object.

    Attributes:
        arena: The memory.
        allocator: Cuts it; what is in it already is taken.
        extents: What sessions tell of reservations.
        on_kept: What the hot tier tells of chunks that it keeps; None: nothing is written down.
    """

    def __init__(self, opened: OpenedArena) -> None:
        books, found = opened.books, opened.found
        self.arena: SharedArena = opened.arena
        self.allocator = ArenaAllocator(
            opened.arena.store_view, None if books is None else books.freed
        )
        self.extents: ReservedExtents = UnrecordedExtents() if books is None else books
        self.on_kept: OnKept | None = None if books is None else books.kept
        self._books = books
        chunks = self.allocator.take([(entry.offset, entry.length) for entry in found.committed])
        lent = {
            generation: self.allocator.take(extents) for generation, extents in found.lent.items()
        }
        self._chunks: list[tuple[Committed, MemoryObj]] = list(
            zip(found.committed, chunks, strict=True)
        )
        self._earlier = EarlierGenerations(opened.arena.path.parent, lent, self.extents.flush)
        self._recovery: ArenaRecovery | None = None

    @property
    def status(self) -> ArenaStatus:
        """What there is to tell of it."""
        progress = (
            RecoveryProgress(len(self._chunks))
            if self._recovery is None
            else self._recovery.progress
        )
        return ArenaStatus(
            self._books is not None and self._books.is_recording, self._earlier.num_bytes, progress
        )

    def start(
        self,
        tasks: TaskSupervisor,
        hot: LocalCPUBackend,
        listener: StackListener,
        counters: Counters,
    ) -> None:
        """Begin to serve: check what is there in the background, and look after journal and earlier
        generations.

        Args:
            tasks: Who owns the work.
            hot: Where recovered chunks go.
            listener: Told of each.
            counters: Where they are counted.
        """
        self._recovery = ArenaRecovery(self._chunks, hot, listener, counters)
        tasks.start("recover-arena", self._recovery.run())
        tasks.repeat("earlier-generations", self._earlier.look, LOOK_INTERVAL_S)
        if self._books is not None:
            tasks.repeat("arena-journal", self._books.look_after, LOOK_INTERVAL_S)

    def seal(self) -> None:
        """What is in the arena now is what the next start shall find: to be called before tiers
        are emptied. Idempotent.
        """
        if self._books is not None:
            self._books.close()

    def close(self) -> None:
        """Give the directory up, once nothing is served from it any more. What will not be found
        again is removed. Idempotent.
        """
        self.seal()
        self._earlier.close()
        if self._recovery is not None:
            self._recovery.close()
        if self._books is None or (self._books.is_empty and self._recovery is None):
            unlink_shared_arena(self.arena)
            if self._books is not None:
                self._books.remove()
        self.arena.lock.release()
