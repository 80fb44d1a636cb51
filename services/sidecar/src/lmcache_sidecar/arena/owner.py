"""The arena of this process, from its first byte to what it leaves to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.memory import ArenaAllocator, MemoryObj, SharedArena
from lmcache_core.memory.arena_locks import forget_generation, is_over
from lmcache_core.memory.shared import unlink_shared_arena
from lmcache_core.storage.hot import LocalCPUBackend, OnKept
from lmcache_core.storage.stack import StackListener
from lmcache_core.telemetry import Counters

from lmcache_sidecar.arena.entries import Committed
from lmcache_sidecar.arena.extents import ReservedExtents, UnrecordedExtents
from lmcache_sidecar.arena.opening import OpenedArena
from lmcache_sidecar.arena.recovery import ArenaRecovery, RecoveryProgress

logger = logging.getLogger(__name__)

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


class EarlierGenerations:
    """Holds what was lent when earlier starts ended, until their clients are gone.

    Args:
        directory: Where the arena is.
        lent: The memory by generation; the references pass to this object.
        flush: Writes down that memory is free.
    """

    def __init__(
        self, directory: Path, lent: Mapping[int, Sequence[MemoryObj]], flush: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._lent = dict(lent)
        self._flush = flush

    @property
    def num_bytes(self) -> int:
        """What they hold of the arena."""
        return sum(
            memory.metadata.phy_size for memories in self._lent.values() for memory in memories
        )

    async def look(self) -> None:
        """Give back the memory of those whose clients are gone; to be called every second or so."""
        for generation in [
            generation for generation in self._lent if is_over(self._directory, generation)
        ]:
            memories = self._lent.pop(generation)
            for memory in memories:
                memory.ref_count_down()
            self._flush()  # before its file goes: a generation without one is not known to be over
            forget_generation(self._directory, generation)
            logger.info(
                "the last client of generation %016x is gone: %d extents are free again",
                generation,
                len(memories),
            )

    def close(self) -> None:
        """Give everything back: this process ends. Idempotent."""
        lent, self._lent = self._lent, {}
        for memories in lent.values():
            for memory in memories:
                memory.ref_count_down()


class ArenaOwner:
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
        journal, found = opened.journal, opened.found
        self.arena: SharedArena = opened.arena
        self.allocator = ArenaAllocator(
            opened.arena.store_view, None if journal is None else journal.freed
        )
        self.extents: ReservedExtents = UnrecordedExtents() if journal is None else journal
        self.on_kept: OnKept | None = None if journal is None else journal.kept
        self._journal = journal
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
            self._journal is not None and self._journal.is_recording,
            self._earlier.num_bytes,
            progress,
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
        if self._journal is not None:
            tasks.repeat("arena-journal", self._journal.look_after, LOOK_INTERVAL_S)

    def seal(self) -> None:
        """What is in the arena now is what the next start shall find: to be called before tiers
        are emptied. Idempotent.
        """
        if self._journal is not None:
            self._journal.close()

    def close(self) -> None:
        """Give the directory up, once nothing is served from it any more. What will not be found
        again is removed. Idempotent.
        """
        self.seal()
        self._earlier.close()
        if self._recovery is not None:
            self._recovery.close()
        if self._journal is None or (self._journal.is_empty and self._recovery is None):
            unlink_shared_arena(self.arena)
            if self._journal is not None:
                self._journal.remove()
        self.arena.lock.release()
