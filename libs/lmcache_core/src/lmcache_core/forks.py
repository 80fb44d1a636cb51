"""What a forked child must not use: a fork copies objects, locks and descriptors, but no other
thread. No other module compares process ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import weakref
from typing import Final, Protocol

OPEN_IN_EACH_PROCESS: Final = "opened before a fork: open it in each worker"
"""What is wrong with a loop, and all that runs on it, in a forked child, and the fix."""

_add_reference = ctypes.pythonapi.Py_IncRef
_add_reference.argtypes = [ctypes.py_object]
_add_reference.restype = None


class ProcessMark:
    """The process that has made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Return whether this is that process, not a forked child."""
        return os.getpid() == self._pid


def unlock(fd: int, locked_in: ProcessMark) -> None:
    """Close a file that is locked with flock; a forked child closes only its copy, and the lock
    stays with the process that has taken it.
    """
    if locked_in.is_here:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # effective even if a child still has the file open
    os.close(fd)


class Forkable(Protocol):
    """Has a lock that another thread may hold during a fork, or holds what belongs to its process
    alone.
    """

    def enter_child(self) -> None:
        """Replace the one and let go of the other, in a forked child's only thread. Must take no
        lock.
        """


_forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()


def enter_children(one: Forkable) -> None:
    """Call `one.enter_child` in every child that this process forks from now on."""
    _forkable.add(one)


def never_finalize(one: object) -> None:
    """Keep an object, and what it references, for as long as the process lives: in a forked child,
    finalizers and `finally` blocks of its parent's work would end the parent's connections, or wait
    for locks that no thread holds.
    """
    _add_reference(one)


def _enter_child() -> None:
    for one in list(_forkable):
        one.enter_child()


os.register_at_fork(after_in_child=_enter_child)
