"""Locks in an arena's directory: who owns it, and whether clients of a start of the sidecar are
still there.

A lock ends with its process at the latest, however that ends. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from lmcache_core.errors import ConfigError, UnavailableError

GENERATION_SUFFIX = ".generation"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileLock:
    """An flock that this process holds.

    Args:
        fd: An open file that has been locked; closed with the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._pid = os.getpid()

    @property
    def is_held(self) -> bool:
        """Whether it has not been released."""
        return self._fd is not None

    def release(self) -> None:
        """Unlock. Idempotent. A forked child shares the lock with its parent: it only lets go of
        its share.
        """
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # also where a child still has the file open
        os.close(fd)


def own_directory(directory: Path) -> FileLock:
    """Lock an arena's directory for its one sidecar; made when missing, for its owner and group.

    The directory is locked and not the arena's file, since a file that is replaced would take the
    right to replace it along.

    Raises:
        ConfigError: Another sidecar has it, or it cannot be made or opened.
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
    """Return the file that clients of that generation hold a lock on."""
    return directory / f"{generation:016x}{GENERATION_SUFFIX}"


def begin_generation(directory: Path, generation: int, mode: int) -> None:
    """Make the file that clients of a new generation lock, for the processes that may open the
    arena.

    Raises:
        OSError: It cannot be made.
    """
    path = generation_path(directory, generation)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def join_generation(directory: Path, generation: int) -> FileLock:
    """Say as a client that memory of this generation is being touched, until the lock is released.

    Raises:
        UnavailableError: There is no such generation, or it is over.
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
        raise UnavailableError(f"generation {path} is over: {exc}") from exc
    return FileLock(fd)


def is_over(directory: Path, generation: int) -> bool:
    """Return whether no client of an earlier generation is left. One whose file is gone is not
    known to be over.
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
    """Remove the file of a generation that is over, or whose clients can do no harm. Idempotent."""
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
