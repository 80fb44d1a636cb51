"""The arena of this process: opened, recovered, and left to the next start."""

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
    """Owns the arena, its journal, and the content that an earlier start has left.

    Args:
        journal: Journal of its content; None if nothing outlives this process.

    Attributes:
        allocator: Allocates from it; existing content is already taken.
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
        # Memory still lent when earlier starts ended, held until their clients are gone.
        self._lent = {
            generation: self.allocator.take(extents) for generation, extents in found.lent.items()
        }
        self._has_served = False

    @property
    def is_recorded(self) -> bool:
        """Return whether the arena's content will outlive this process."""
        return self.journal is not None and self.journal.is_recording

    @property
    def huge_pages(self) -> bool:
        """Return whether the kernel was asked for huge pages."""
        return self.arena.huge_pages

    @property
    def lent_bytes(self) -> int:
        """Return how many bytes clients of earlier starts may still write to; they are not
        reused.
        """
        lent = self._lent.values()
        return sum(memory.metadata.phy_size for memories in lent for memory in memories)

    def start(
        self,
        tasks: TaskSupervisor,
        hot: LocalCPUBackend,
        listener: StackListener,
        counters: Counters,
    ) -> None:
        """Begin to serve: check existing content in the background, and maintain the journal and
        earlier generations.

        Args:
            listener: Notified of each recovered chunk.
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
                # Before the file is removed: a generation without a file is not known to have
                # ended.
                self.journal.flush()
            forget_generation(directory, generation)
            logger.info(
                "last client of an earlier generation is gone: generation=%016x freed_extents=%d",
                generation,
                len(memories),
            )

    def seal(self) -> None:
        """Finalize the content for the next start. Call it before tiers are emptied. Idempotent."""
        if self.journal is not None:
            self.journal.close()

    def close(self) -> None:
        """Release the directory once nothing is served from it. Files that will not be used again
        are removed. Idempotent.
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
                    logger.debug("cannot remove the journal of an empty arena: error=%s", exc)
        self.arena.lock.release()


def open_arena(file: ArenaFile, recovers: bool) -> ArenaOwner:
    """Lock the directory and map an arena: the previous start's if it fits and its journal can be
    trusted, else a new one.

    Args:
        recovers: Whether the content outlives this process, and an earlier process's content is
            recovered.

    Raises:
        CapacityError: It does not fit on the volume, or what an earlier start has left cannot be
            opened at the moment.
        ConfigError: Another sidecar uses it, or the directory is not writable.
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
                path.lstat()  # `exists` would treat any error as absence
            except FileNotFoundError as exc:
                raise JournalError(
                    f"cannot find out whether the clients of generation {generation:016x} have"
                    " ended"
                ) from exc
            except OSError as exc:
                raise cannot_be_opened(path, exc) from exc
    except JournalError as exc:
        logger.warning("not reusing the arena of an earlier start: error=%s", exc)
        return None
    for generation in generations_in(file.directory):
        if generation not in found.lent and generation != arena.generation:
            forget_generation(file.directory, generation)
    logger.info("reusing the arena of an earlier start: chunks_to_check=%d", len(found.committed))
    return arena, found


def _created(file: ArenaFile, lock: FileLock) -> tuple[SharedArena, FoundExtents]:
    # Remove the old arena's journal first, so that it can never be taken for the new one's.
    try:
        discard_journal(file.directory)
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename} is of another arena and cannot be removed: {exc.strerror}; remove it"
        ) from exc
    return file.create(lock), FoundExtents()
