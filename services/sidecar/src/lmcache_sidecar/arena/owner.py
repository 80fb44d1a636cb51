"""The arena of this process, from its first byte to what it leaves to the next."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError
from lmcache_core.memory import ArenaAllocator, SharedArena
from lmcache_core.memory.arena_locks import (
    FileLock,
    forget_generation,
    generation_path,
    generations_in,
    is_over,
    own_directory,
)
from lmcache_core.memory.shared import ArenaFile, cannot_be_opened, unlink_shared_arena
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import StackListener
from lmcache_core.telemetry import Counters

from lmcache_sidecar.arena.entries import FoundExtents, JournalError, replay
from lmcache_sidecar.arena.journal import ArenaJournal, discard_journal, read_journal
from lmcache_sidecar.arena.recovery import ArenaRecovery

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class ArenaOwner:
    """Owns the arena, its journal, and what an earlier start has left in it.

    Args:
        arena: The memory.
        journal: What is in it, written down; None where nothing outlives this process.
        found: What is in it already.

    Attributes:
        arena: The memory.
        allocator: Cuts it; what is in it already is taken.
        journal: Told of what is lent and kept; or None.
        recovery: The check of what an earlier start has left.
    """

    def __init__(
        self, arena: SharedArena, journal: ArenaJournal | None, found: FoundExtents
    ) -> None:
        self.arena = arena
        self.journal = journal
        self.allocator = ArenaAllocator(
            arena.store_view, None if journal is None else journal.freed
        )
        chunks = self.allocator.take([(entry.offset, entry.length) for entry in found.committed])
        self.recovery = ArenaRecovery(list(zip(found.committed, chunks, strict=True)))
        # What was lent when earlier starts ended, held until their clients are gone.
        self._lent = {
            generation: self.allocator.take(extents) for generation, extents in found.lent.items()
        }
        self._has_served = False

    @property
    def is_recorded(self) -> bool:
        """Return whether what is in the arena now will outlive this process."""
        return self.journal is not None and self.journal.is_recording

    @property
    def lent_bytes(self) -> int:
        """Return what clients of earlier starts may still write to; it is not reused."""
        lent = self._lent.values()
        return sum(memory.metadata.phy_size for memories in lent for memory in memories)

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
        self._has_served = True
        tasks.start("recover-arena", self.recovery.run(hot, listener, counters))
        tasks.repeat("earlier-generations", self.free_ended_generations, LOOK_INTERVAL_S)
        if self.journal is not None:
            tasks.repeat("arena-journal", self.journal.look_after, LOOK_INTERVAL_S)

    async def free_ended_generations(self) -> None:
        """Free the memory of generations whose clients are gone."""
        directory = self.arena.path.parent
        for generation in [each for each in self._lent if is_over(directory, each)]:
            memories = self._lent.pop(generation)
            for memory in memories:
                memory.ref_count_down()
            if self.journal is not None:
                # Before its file goes: a generation without one is not known to be over.
                self.journal.flush()
            forget_generation(directory, generation)
            logger.info(
                "the last client of generation %016x is gone: %d extents are free again",
                generation,
                len(memories),
            )

    def seal(self) -> None:
        """Fix what the next start will find; to be called before tiers are emptied. Idempotent."""
        if self.journal is not None:
            self.journal.close()

    def close(self) -> None:
        """Give the directory up, once nothing is served from it any more. What will not be found
        again is removed. Idempotent.
        """
        self.seal()
        self.recovery.close()
        for memories in self._lent.values():
            for memory in memories:
                memory.ref_count_down()
        self._lent.clear()
        if self.journal is None or (self.journal.is_empty and not self._has_served):
            unlink_shared_arena(self.arena)
            if self.journal is not None:
                try:
                    discard_journal(self.arena.path.parent)
                except OSError as exc:
                    logger.debug("journal of an empty arena not removed: %s", exc)
        self.arena.lock.release()


def open_arena(file: ArenaFile, recovers: bool) -> ArenaOwner:
    """Own the directory and map an arena: that of the start before where it fits and its journal
    can be trusted, else a new one.

    Args:
        file: Where, how large and for whom.
        recovers: Whether what is in it outlives this process, and what an earlier one has left is
            looked for.

    Raises:
        CapacityError: The volume cannot hold it, or what an earlier start has left cannot be opened
            just now.
        ConfigError: Another sidecar has it, or the directory cannot be written to.
    """
    with ExitStack() as undo:
        lock = own_directory(file.directory)
        undo.callback(lock.release)
        arena, found = (_reopened(file, lock) if recovers else None) or _created(file, lock)
        journal = None
        if recovers:
            journal = ArenaJournal(arena, found)
            journal.open()
        undo.pop_all()
    return ArenaOwner(arena, journal, found)


def _reopened(file: ArenaFile, lock: FileLock) -> tuple[SharedArena, FoundExtents] | None:
    arena = file.reopen(lock)
    if arena is None:
        return None
    try:
        found = replay(read_journal(file.directory), arena.size, arena.inode)
        for generation in found.lent:
            path = generation_path(file.directory, generation)
            try:
                path.lstat()  # `exists` would take any error for absence
            except FileNotFoundError as exc:
                raise JournalError(
                    f"cannot find out whether the clients of generation {generation:016x} have"
                    " ended"
                ) from exc
            except OSError as exc:
                raise cannot_be_opened(path, exc) from exc
    except JournalError as exc:
        logger.warning("the arena of an earlier start is not used again: %s", exc)
        return None
    for generation in generations_in(file.directory):
        if generation not in found.lent and generation != arena.generation:
            forget_generation(file.directory, generation)
    logger.info(
        "the arena of an earlier start is used again: %d chunks to check", len(found.committed)
    )
    return arena, found


def _created(file: ArenaFile, lock: FileLock) -> tuple[SharedArena, FoundExtents]:
    # The journal of the old arena goes first, so that it can never be taken for that of the new.
    try:
        discard_journal(file.directory)
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename} is of another arena and cannot be removed: {exc.strerror}; remove it"
        ) from exc
    return file.create(lock), FoundExtents()
