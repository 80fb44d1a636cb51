"""Populates mapped memory with pages before use, so that first use causes no page faults."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""Source: Linux, include/uapi/asm-generic/mman-common.h (5.14 and later); Python lacks these
constants, and its own `madvise` holds the interpreter's lock.
"""
STEP_BYTES = 64 << 20
BACKGROUND_STEP_BYTES = 16 << 20
MAX_THREADS = 16
LOG_INTERVAL_S = 5.0
NODES = Path("/sys/devices/system/node")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Buffer(ctypes.Structure):
    """`Py_buffer`; `others` has room for all of its further fields."""

    _fields_ = (("address", ctypes.c_void_p), ("others", ctypes.c_void_p * 15))


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_Buffer)]
_release_buffer.restype = None


def allocate(fd: int, size: int) -> None:
    """Allocate the blocks of a new file, on a file system in memory in turn on every memory node
    whose processors this process may use: so no link between sockets carries all loads.

    A memory policy would do the same, but needs a capability that pods do not have.

    Raises:
        OSError: There is no room.
    """
    if len(memory_nodes()) < 2:
        os.posix_fallocate(fd, 0, size)
        return
    with _threads(size) as threads:
        steps = range(0, size, STEP_BYTES)
        for done in [
            threads.submit(os.posix_fallocate, fd, at, min(STEP_BYTES, size - at)) for at in steps
        ]:
            done.result()


def memory_nodes() -> list[set[int]]:
    """Return the processors that this process may use, by memory node; nodes without any are left
    out, and all of them where the system does not tell.
    """
    usable = os.sched_getaffinity(0)
    try:
        with_memory = _numbers((NODES / "has_memory").read_text())
        nodes = [
            _numbers((NODES / f"node{node}" / "cpulist").read_text()) & usable
            for node in sorted(with_memory)
        ]
    except (OSError, ValueError):
        return []
    return [node for node in nodes if node]


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _threads(num_bytes: int) -> ThreadPoolExecutor:
    """Return one thread per processor for the steps of that many bytes, in turn on each node."""
    nodes = memory_nodes()
    number = min(len(os.sched_getaffinity(0)), MAX_THREADS, -(-num_bytes // STEP_BYTES))
    turns = itertools.cycle(nodes)

    def begin() -> None:
        if len(nodes) > 1:
            with contextlib.suppress(OSError):  # a sandbox may forbid it; the spread is lost then
                os.sched_setaffinity(0, next(turns))  # of this thread alone

    return ThreadPoolExecutor(max(number, 1), "lmcache-populate", begin)


def populate(view: memoryview) -> None:
    """Give every page of a new mapping memory, with one thread per processor. Progress is logged
    every `LOG_INTERVAL_S`. Blocks of a mapped file must already be allocated.

    Args:
        view: All bytes of a writable, page-aligned mapping; all are zero.

    Raises:
        OSError: There is no room.
    """
    num_bytes, num_done, lock = len(view), 0, threading.Lock()
    log_at = time.monotonic() + LOG_INTERVAL_S

    def fill(at: int) -> None:
        nonlocal num_done, log_at
        step = min(STEP_BYTES, num_bytes - at)
        try:
            _populate(view, at, step, MADV_POPULATE_WRITE)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # An older kernel.
            view[at : at + step : mmap.PAGESIZE] = bytes(-(-step // mmap.PAGESIZE))
        with lock:
            num_done += step
            if time.monotonic() >= log_at:
                log_at += LOG_INTERVAL_S
                logger.info(
                    "allocating memory: done_gb=%.1f of_gb=%.1f",
                    num_done / 2**30,
                    num_bytes / 2**30,
                )

    with _threads(num_bytes) as threads:
        for done in [threads.submit(fill, at) for at in range(0, num_bytes, STEP_BYTES)]:
            done.result()


class BackgroundPopulation:
    """Maps existing pages into this process in the background, using at most half of one processor.
    A kernel without support, and a process that may start no thread, leave them to page faults.

    Args:
        view: Bytes of a page-aligned mapping; kept until the work has ended.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-populate", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            logger.debug("cannot map the arena's pages ahead: error=%s", exc)

    def stop(self) -> None:
        """Stop within one step. Idempotent."""
        self._is_over.set()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        view = self._view
        advice = MADV_POPULATE_READ if view.readonly else MADV_POPULATE_WRITE
        for at in range(0, len(view), BACKGROUND_STEP_BYTES):
            began = time.monotonic()
            try:
                _populate(view, at, min(BACKGROUND_STEP_BYTES, len(view) - at), advice)
            except OSError as exc:
                logger.debug("cannot map the arena's pages ahead: error=%s", exc)
                return
            if self._is_over.wait(time.monotonic() - began):
                return


def _populate(view: memoryview, at: int, num_bytes: int, advice: int) -> None:
    buffer = _Buffer()
    _get_buffer(view, buffer, 0)
    try:
        address = buffer.address + at
        whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        while _libc.madvise(address, whole, advice):
            number = ctypes.get_errno()
            if number == errno.EFAULT:  # a write would have caused a SIGBUS
                number = errno.ENOSPC
            if number not in {errno.EINTR, errno.EAGAIN}:
                raise OSError(number, os.strerror(number))
    finally:
        _release_buffer(buffer)
