"""Locks, threads and clocks of Python, on simulated threads and virtual time.

`install` puts them where the standard library has its own, before anything else imports them. So
asyncio, concurrent.futures, queue, uvicorn, redis-py and httpx run unmodified. Some of those places
are private to the standard library: it has no public ones for its locks' classes, its table of
threads, and the lock of imports.
"""

from __future__ import annotations

import _threading_local
import importlib
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from tests.simulation.kernel import CLOCK_READ_S, EPOCH_S, Kernel, Thread
from tests.simulation.order import numbered

SWITCH_CHANCE = 0.05
"""How often taking a free lock lets other threads run first."""

NUM_CORES = 4

kernel: Kernel
"""The simulation of this process."""


class Lock:
    """A lock that serves waiting simulated threads in order of arrival.

    Each real process has its own copy of a module's locks; simulated processes share one. So a
    thread that holds such a lock is not interrupted, and the death of a process releases it.
    """

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._is_locked = False
        self._is_shared = _num_imports > 0 or kernel.current is None
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        thread = kernel.current
        if (
            thread is not None
            and blocking
            and not _num_imports
            and not thread.num_shared_locks
            and kernel.random.random() < SWITCH_CHANCE
        ):
            kernel.sleep(0.0)
        if self._is_free:
            self._take(thread)
            return True
        if not blocking:
            return False
        assert thread is not None, "a lock is held outside of the simulation"
        deadline = None if timeout < 0 else kernel.now + timeout
        self._waiting.append(thread)
        try:
            while not self._is_free:
                left_s = None if deadline is None else deadline - kernel.now
                if left_s is not None and left_s <= 0:
                    return False
                if self._is_shared:  # its owner may die
                    left_s = min(1.0, left_s or 1.0)
                kernel.block(left_s)
        finally:
            self._waiting.remove(thread)
        self._take(thread)
        return True

    @property
    def _is_free(self) -> bool:
        # A lock may be released by a thread other than its owner, so death frees only shared ones.
        owner = self._owner
        return not self._is_locked or (
            self._is_shared and owner is not None and owner.process.is_dead
        )

    def _take(self, thread: Thread | None) -> None:
        self._is_locked, self._owner = True, thread
        if self._is_shared and thread is not None:
            thread.num_shared_locks += 1

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        if self._is_shared and self._owner is not None:
            self._owner.num_shared_locks -= 1
        self._is_locked, self._owner = False, None
        for thread in list(self._waiting):
            kernel.wake(thread)
            if not self._is_shared:
                break  # of other processes the first may be dead, or paused

    def locked(self) -> bool:
        return self._is_locked

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.release()


@numbered
class SimulatedThread(threading.Thread):
    """`threading.Thread` on a simulated thread of the process that starts it."""

    _simulated: Thread | None = None
    _has_ended = False

    def start(self) -> None:
        if self._simulated is not None:
            raise RuntimeError("threads can only be started once")
        current = kernel.current
        assert current is not None, "a thread is started outside of the simulation"
        process = current.process
        if len(kernel.threads(process)) >= process.max_threads:
            raise RuntimeError("can't start new thread")
        self._joining: list[Thread] = []
        self._simulated = kernel.spawn(process, self.name, self._run_simulated)
        _threads()[self._simulated.ident] = self
        self._started.set()  # type: ignore[attr-defined]

    def _run_simulated(self) -> None:
        assert self._simulated is not None
        try:
            self.run()
        finally:
            self._has_ended = True
            _threads().pop(self._simulated.ident, None)
            for thread in self._joining:
                kernel.wake(thread)

    def is_alive(self) -> bool:
        return self._simulated is not None and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        if self._simulated is None:
            raise RuntimeError("cannot join thread before it is started")
        current = kernel.current
        assert current is not None
        deadline = None if timeout is None else kernel.now + timeout
        while not self._has_ended:
            self._joining.append(current)
            try:
                if not kernel.block(None if deadline is None else deadline - kernel.now):
                    return
            finally:
                self._joining.remove(current)

    @property
    def ident(self) -> int | None:  # type: ignore[override]
        return None if self._simulated is None else self._simulated.ident

    native_id = ident  # type: ignore[assignment]


_num_imports = 0


def _import_at_once() -> None:
    """Let no other thread run while a module is imported: it would see a partial module."""
    bootstrap = vars(importlib)["_bootstrap"]
    original = bootstrap._find_and_load

    def find_and_load(name: str, import_: Any) -> Any:
        global _num_imports
        _num_imports += 1
        try:
            return original(name, import_)
        finally:
            _num_imports -= 1

    bootstrap._find_and_load = find_and_load


def _threads() -> dict[int, threading.Thread]:
    """Return the table of threads that `threading` keeps."""
    table: dict[int, threading.Thread] = vars(threading)["_active"]
    return table


def _monotonic() -> float:
    kernel.now += CLOCK_READ_S
    return kernel.now


def wall_time() -> float:
    """Return the time by the clock of the current process's machine."""
    process = kernel.process
    kernel.now += CLOCK_READ_S
    return EPOCH_S + kernel.now + (0.0 if process is None else process.machine.wall_offset_s)


def _ident() -> int:
    thread = kernel.current
    return 0 if thread is None else thread.ident


def _pid() -> int:
    process = kernel.process
    return 1 if process is None else process.pid


def _exit(code: int) -> None:
    process = kernel.process
    assert process is not None
    kernel.end_process(process, code)


def be_main_thread() -> None:
    """Make the current simulated thread its process's main thread."""
    _threads()[_ident()] = threading.main_thread()


def _in_ns(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(clock() * 1e9)


def install(one: Kernel) -> None:
    """Replace threads, locks, clocks and randomness of this process permanently."""
    global kernel
    kernel = one
    chance = random.Random(one.random.random())
    recursive_lock = vars(threading)["_PyRLock"]
    replacements: dict[ModuleType, dict[str, Any]] = {
        threading: {
            "Lock": Lock,
            "_allocate_lock": Lock,
            "RLock": recursive_lock,
            "_CRLock": None,
            "get_ident": _ident,
            "get_native_id": _ident,
            "local": _threading_local.local,
            "_active": {0: threading.main_thread()},
            "Thread": SimulatedThread,
            "Timer": None,
            "_time": _monotonic,
        },
        _threading_local: {"RLock": recursive_lock},
        queue: {"SimpleQueue": vars(queue)["_PySimpleQueue"], "time": _monotonic},
        time: {
            "monotonic": _monotonic,
            "perf_counter": _monotonic,
            "monotonic_ns": _in_ns(_monotonic),
            "perf_counter_ns": _in_ns(_monotonic),
            "time": wall_time,
            "time_ns": _in_ns(wall_time),
            "thread_time": _monotonic,
            "process_time": _monotonic,
            "sleep": lambda seconds: kernel.sleep(seconds),
        },
        os: {
            "getpid": _pid,
            "_exit": _exit,
            "urandom": chance.randbytes,
            "cpu_count": lambda: NUM_CORES,
            "sched_getaffinity": lambda pid: set(range(NUM_CORES)),
            "getloadavg": lambda: (0.5, 0.5, 0.5),
        },
        random: {"_urandom": chance.randbytes},
    }
    for module, names in replacements.items():
        for name, replacement in names.items():
            setattr(module, name, replacement)
    random.seed(chance.random())
    seeds = random.Random(f"seeds {one.seed}")

    class SeededRandom(random.Random):
        """Takes its seed from the simulation if none is given; otherwise the system draws it."""

        def __init__(self, x: Any = None) -> None:
            super().__init__(seeds.random() if x is None else x)

    random.Random = SeededRandom  # type: ignore[misc]
    _import_at_once()
    for name in ("asyncio", "concurrent.futures", "uvicorn", "torch", "httpx"):
        assert name not in sys.modules, f"{name} was imported before the simulation's clocks"
