"""Locks in an arena's directory: which process owns it, and whether clients of a sidecar's earlier
start still use it.

A lock ends with its process at the latest, in whatever way the process ends. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.forks import ProcessMark, unlock

GENERATION_SUFFIX = ".generation"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileLock:
    """An flock that this process holds.

    Args:
        fd: An open file that has been locked; closed with the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._process = ProcessMark()

    @property
    def is_held(self) -> bool:
        """Whether the lock is held."""
        return self._fd is not None

    def release(self) -> None:
        """Unlock. Idempotent. A forked child shares the lock with its parent and releases only its
        share.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            unlock(fd, self._process)


def own_directory(directory: Path) -> FileLock:
    """Lock an arena's directory for its one sidecar; created if missing, for its owner and group.

    The directory is locked, not the arena's file: replacing a file would also replace the right to
    replace it.

    Raises:
        ConfigError: Another sidecar has locked it, or it cannot be created or opened.
    """
    setting = f"arena_path={str(directory)!r}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o770)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(
            f"{setting}: {exc.strerror}; choose a directory that this user can write to"
        ) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            raise ConfigError(
                f"{setting}: another sidecar has its memory there; stop it or choose another"
                " directory"
            ) from exc
        raise ConfigError(
            f"{setting}: {exc.strerror}; choose a directory whose file system has locks"
        ) from exc
    return FileLock(fd)


def generation_path(directory: Path, generation: int) -> Path:
    """Return the file that clients of that generation lock."""
    return directory / f"{generation:016x}{GENERATION_SUFFIX}"


def begin_generation(directory: Path, generation: int, mode: int) -> None:
    """Create the file that clients of a new generation lock, for the processes that may open the
    arena.

    Raises:
        OSError: It cannot be created.
    """
    path = generation_path(directory, generation)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def join_generation(directory: Path, generation: int) -> FileLock:
    """Lock a generation as a client that touches its memory, until the lock is released.

    Raises:
        UnavailableError: There is no such generation, or it has ended.
    """
    path = generation_path(directory, generation)
    try:
        fd = os.open(path, _READ)
    except (OSError, ValueError) as exc:
        what = getattr(exc, "strerror", None) or exc
        raise UnavailableError(
            f"{path}: {what}; engines must see the sidecar's arena_path, by that name, and be"
            " allowed to read it"
        ) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise UnavailableError(f"generation {path} has ended: {exc}") from exc
    return FileLock(fd)


def is_over(directory: Path, generation: int) -> bool:
    """Return whether no client of a generation is left. If its file is missing, that is unknown:
    return False.
    """
    try:
        fd = os.open(generation_path(directory, generation), _READ)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def forget_generation(directory: Path, generation: int) -> None:
    """Remove the file of a generation that has ended, or whose clients can do no harm.
    Idempotent.
    """
    with contextlib.suppress(OSError):
        generation_path(directory, generation).unlink()


def generations_in(directory: Path) -> list[int]:
    """Return the generations that have a file in this directory."""
    found = []
    for path in directory.glob(f"*{GENERATION_SUFFIX}"):
        with contextlib.suppress(ValueError):
            generation = int(path.name.removesuffix(GENERATION_SUFFIX), 16)
            found += (
                [generation]
                if generation >= 0 and generation_path(directory, generation) == path
                else []
            )
    return found
