"""The simulated machine room: virtual time, simulated threads, one random generator.

Every simulated thread is a greenlet, so one operating-system thread runs the whole cluster. A
thread runs until it waits: for a lock, a socket, a file, a point in time. What runs next is decided
by virtual time and, among what is due at the same time, by the seed.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

import greenlet

STEP_S = 20e-6
"""Least virtual time that a thread takes between two waits."""
CLOCK_READ_S = 1e-7
"""Virtual time that reading a clock takes, so that a loop without sleep reaches its deadline."""
EPOCH_S = 1_800_000_000.0
"""Wall-clock time at which each simulation begins."""
MAX_DESCRIPTORS = 1024
"""Open descriptors that a process may have."""
MAX_THREADS = 1024
"""The same for its threads."""
_pack_step = struct.Struct("dI").pack


class Machine:
    """A machine: the state that survives its processes.

    Attributes:
        name: Its host name.
        address: Its IP address.
        wall_offset_s: How far its wall clock is off.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.wall_offset_s = 0.0


class Process:
    """A simulated process.

    Attributes:
        name: For people.
        pid: Unique in a simulation.
        exit_code: None while it runs; negative if it was killed.
        descriptors: Its open files and sockets.
        max_descriptors: How many of them it may have.
        max_threads: The same for threads.
        loops: The event loops that it created.
        started_s: When it began.
        at_copy: Called once, when an engine's process is about to copy KV to or from the arena.
        paused_s: Total time for which it was paused.
    """

    def __init__(self, kernel: Kernel, name: str, machine: Machine, pid: int) -> None:
        self.kernel = kernel
        self.name = name
        self.machine = machine
        self.pid = pid
        self.is_dead = False
        self.exit_code: int | None = None
        self.is_paused = False
        self.signals: dict[int, Callable[[int, None], object]] = {}
        self.descriptors: dict[int, Any] = {}
        self.max_descriptors = MAX_DESCRIPTORS
        self.max_threads = MAX_THREADS
        self.watchers: list[Thread] = []
        self.loops: list[Any] = []
        self.started_s = kernel.now
        self.at_copy: Callable[[], object] | None = None
        self.paused_s = 0.0
        self._paused_at = 0.0
        self._postponed: list[tuple[Thread, int]] = []

    def postpone(self, thread: Thread, epoch: int) -> None:
        """Keep a wake-up until the process is resumed."""
        self._postponed.append((thread, epoch))

    def pause(self) -> None:
        """Stop the process, as SIGSTOP does."""
        if not self.is_paused:
            self.is_paused, self._paused_at = True, self.kernel.now

    def resume(self) -> None:
        """Resume a paused process, as SIGCONT does."""
        if self.is_paused:
            self.paused_s += self.kernel.now - self._paused_at
        self.is_paused = False
        for thread, epoch in self._postponed:
            self.kernel.schedule(thread, epoch, 0.0)
        self._postponed.clear()


class Thread:
    """A simulated thread of a simulated process."""

    __slots__ = (
        "epoch",
        "greenlet",
        "hooks",
        "ident",
        "is_blocked",
        "loop",
        "name",
        "num_shared_locks",
        "process",
        "was_woken",
    )

    def __init__(self, process: Process, name: str, ident: int) -> None:
        self.process = process
        self.name = name
        self.ident = ident
        self.epoch = 0
        self.is_blocked = False
        self.was_woken = False
        self.num_shared_locks = 0
        self.loop: Any = None
        self.hooks: Any = None
        self.greenlet: greenlet.greenlet


class Kernel:
    """Runs simulated threads in virtual time.

    Args:
        seed: Decides everything that is not decided by the program.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self.current: Thread | None = None
        self.processes: list[Process] = []
        self._queue: list[tuple[float, float, int, Any, int]] = []
        self._num_pushed = 0
        self._num_threads = 0
        self._hub = greenlet.getcurrent()
        self._get_loop: Callable[[], Any]
        self._set_loop: Callable[[Any], None]
        # All threads that have not ended: finalisers of a killed process must never run.
        self._threads: set[Thread] = set()
        self._failure: BaseException | None = None
        self._stops_at = float("inf")
        self._log = hashlib.blake2b(digest_size=16)
        self.log_lines: list[str] | None = None

    # --- What happened ---------------------------------------------------------------------------

    def record(self, text: str) -> None:
        """Add a line to the event log, whose digest tells two runs apart."""
        line = f"{self.now:.6f} {text}"
        self._log.update(line.encode() + b"\n")
        if self.log_lines is not None:
            self.log_lines.append(line)

    @property
    def digest(self) -> str:
        """Return the digest of the event log and of all steps of threads so far."""
        return self._log.copy().hexdigest()

    # --- Processes and threads -------------------------------------------------------------------

    @property
    def process(self) -> Process | None:
        """The running process; None outside the simulation."""
        return None if self.current is None else self.current.process

    def threads(self, process: Process) -> list[str]:
        """Return the names of the threads of a process that have not ended."""
        return sorted(thread.name for thread in self._threads if thread.process is process)

    def start_process(self, name: str, machine: Machine, main: Callable[[], int | None]) -> Process:
        """Start a process. Its exit code is the result of `main`."""
        process = Process(self, name, machine, 1000 + len(self.processes))
        self.processes.append(process)
        self.record(f"start {name} pid={process.pid}")

        def run() -> None:
            code: int | None = 1
            try:
                code = main()
            except SystemExit as exc:
                code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
            except Exception:
                self.record(f"traceback {name} {traceback.format_exc()}")
            self.end_process(process, code or 0)

        self.spawn(process, f"{name}.main", run)
        return process

    def end_process(self, process: Process, exit_code: int) -> None:
        """End a process at once, as the kernel does: its sockets and files are closed, none of its
        threads runs another line.
        """
        if process.is_dead:
            return
        process.is_dead = True
        process.exit_code = exit_code
        self.record(f"end {process.name} pid={process.pid} code={exit_code}")
        for descriptor in list(process.descriptors.values()):
            descriptor.process_ended()
        process.descriptors.clear()
        for thread in process.watchers:
            self.wake(thread)
        if self.current is not None and self.current.process is process:
            self._leave()

    def wait_process(self, process: Process, timeout_s: float | None = None) -> int | None:
        """Wait for a process to end; return None if it has not."""
        deadline = None if timeout_s is None else self.now + timeout_s
        assert self.current is not None
        while process.exit_code is None:
            process.watchers.append(self.current)
            try:
                if not self.block(None if deadline is None else deadline - self.now):
                    break
            finally:
                process.watchers.remove(self.current)
        return process.exit_code

    def spawn(self, process: Process, name: str, function: Callable[[], object]) -> Thread:
        """Start a thread."""
        self._num_threads += 1
        thread = Thread(process, name, self._num_threads)

        def run() -> None:
            try:
                function()
            except greenlet.GreenletExit:
                raise
            except BaseException as exc:
                self._failure = exc
            finally:
                self._threads.discard(thread)

        thread.greenlet = greenlet.greenlet(run, parent=self._hub)
        thread.is_blocked = True
        thread.was_woken = True
        self._threads.add(thread)
        self.schedule(thread, 0, 0.0)
        return thread

    # --- Waiting ---------------------------------------------------------------------------------

    def schedule(self, target: Any, epoch: int, delay_s: float) -> None:
        """Wake a thread, or call a function (`epoch` -1), after `delay_s`."""
        self._num_pushed += 1
        heapq.heappush(
            self._queue,
            (self.now + delay_s, self.random.random(), self._num_pushed, target, epoch),
        )

    def call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call a function that does not wait."""
        self.schedule(function, -1, delay_s)

    def block(self, timeout_s: float | None) -> bool:
        """Wait until the current thread is woken; return False on a timeout."""
        thread = self.current
        assert thread is not None, "only a simulated thread can wait"
        thread.epoch += 1
        thread.is_blocked = True
        thread.was_woken = False
        if timeout_s is not None:
            self.schedule(thread, thread.epoch, max(timeout_s, STEP_S))
        self._leave()
        return thread.was_woken

    def wake(self, thread: Thread, delay_s: float = 0.0) -> None:
        """Wake a waiting thread."""
        if thread.is_blocked and not thread.was_woken:
            thread.was_woken = True
            self.schedule(thread, thread.epoch, delay_s)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        thread = self.current
        assert thread is not None, "only a simulated thread can wait"
        thread.epoch += 1
        thread.is_blocked = True
        thread.was_woken = True  # nothing else may wake it
        self.schedule(thread, thread.epoch, max(seconds, STEP_S))
        self._leave()

    def _leave(self) -> None:
        """Run something else until the current thread is due."""
        thread = self.current
        assert thread is not None
        thread.loop = self._get_loop()
        thread.hooks = sys.get_asyncgen_hooks()
        following = self._next()
        if following is thread:
            self._enter(thread)
            return
        if following is None:
            self.current = None
            self._hub.switch()
        else:
            self._enter(following)
            following.greenlet.switch()
        # The thread that switched here has already made this one current.
        if thread.hooks != sys.get_asyncgen_hooks():
            sys.set_asyncgen_hooks(*thread.hooks)

    def _enter(self, thread: Thread) -> None:
        self.current = thread
        self._log.update(_pack_step(self.now, thread.ident))
        thread.is_blocked = False
        self._set_loop(thread.loop)

    def _next(self) -> Thread | None:
        """Return the thread that is due; None if the hub is."""
        while self._queue and self._failure is None:
            at, _, _, target, epoch = self._queue[0]
            if at > self._stops_at:
                break
            heapq.heappop(self._queue)
            if epoch == -1:
                self.now = max(self.now, at)
                self.current = None
                self._set_loop(None)
                target()
                continue
            if target.process.is_dead or target.epoch != epoch or not target.is_blocked:
                continue
            if target.process.is_paused:
                target.process.postpone(target, epoch)
                continue
            self.now = max(self.now, at) + STEP_S
            self.num_events += 1
            return target  # type: ignore[no-any-return]
        return None

    def run(self, until_s: float) -> None:
        """Run until that time, or until nothing is left to do."""
        assert greenlet.getcurrent() is self._hub
        # Imported late: asyncio must find the simulation's locks and clocks.
        from asyncio.events import _get_running_loop, _set_running_loop

        self._get_loop, self._set_loop = _get_running_loop, _set_running_loop
        self._stops_at = until_s
        loop, hooks = self._get_loop(), sys.get_asyncgen_hooks()
        while (thread := self._next()) is not None:
            self._enter(thread)
            thread.greenlet.switch()
            self.current = None
        self._set_loop(loop)
        sys.set_asyncgen_hooks(*hooks)
        if self._failure is not None:
            raise self._failure
        if self._stops_at == until_s:
            self.now = max(self.now, until_s)

    def stop(self) -> None:
        """Let `run` return as soon as the current thread waits."""
        self._stops_at = -1.0
