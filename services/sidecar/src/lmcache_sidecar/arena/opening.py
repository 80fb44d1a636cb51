"""The start of a sidecar: the arena of an earlier one, or a new one."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from lmcache_core.errors import ConfigError
from lmcache_core.memory import SharedArena
from lmcache_core.memory.arena_locks import (
    FileLock,
    forget_generation,
    generation_path,
    generations_in,
    own_directory,
)
from lmcache_core.memory.shared import ArenaFile, cannot_be_opened

from lmcache_sidecar.arena.arena_journal import ArenaJournal
from lmcache_sidecar.arena.entries import JournalError
from lmcache_sidecar.arena.journal_file import JournalFiles
from lmcache_sidecar.arena.replay import FoundExtents, replay

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedArena:
    """An arena that is ready to be used.

    Attributes:
        arena: The memory.
        journal: What is in it, written down; None where nothing is to outlive this process.
        found: What is in it already. Those extents are to be taken out of its allocator.
    """

    arena: SharedArena
    journal: ArenaJournal | None
    found: FoundExtents


def open_arena(file: ArenaFile, recovers: bool) -> OpenedArena:
    """Own the directory and map an arena: that of the start before where it fits and its journal
    can be trusted, else a new one.

    Args:
        file: How it is to be.
        recovers: Whether what is in it outlives this process, and what an earlier one has left is
            looked for.

    Raises:
        CapacityError: The volume cannot hold it, or what an earlier start has left cannot be opened
            just now.
        ConfigError: Another sidecar has it, or the directory cannot be written to.
    """
    files = JournalFiles(file.directory)
    with ExitStack() as undo:
        lock = own_directory(file.directory)
        undo.callback(lock.release)
        opened = _reopened(file, files, lock) if recovers else None
        if opened is None:
            arena, found = _created(file, files, lock), FoundExtents()
        else:
            arena, found = opened
        journal = None
        if recovers:
            journal = ArenaJournal(arena, files, found)
            journal.open()
        undo.pop_all()
    return OpenedArena(arena, journal, found)


def _reopened(
    file: ArenaFile, files: JournalFiles, lock: FileLock
) -> tuple[SharedArena, FoundExtents] | None:
    arena = file.reopen(lock)
    if arena is None:
        return None
    try:
        found = replay(files.read(), arena.size, arena.inode)
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


def _created(file: ArenaFile, files: JournalFiles, lock: FileLock) -> SharedArena:
    """A new file; the journal of the old one goes first, so that it can never be taken for that
    of the new one.
    """
    try:
        files.discard()
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename} is of another arena and cannot be removed: {exc.strerror}; remove it"
        ) from exc
    return file.create(lock)
