"""Several processes that serve one port: a parent that owns them, and nothing else."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from typing import Final

logger = logging.getLogger(__name__)

RESTART_PAUSE_S: Final = 1.0
STOP_MARGIN_S: Final = 10.0
"""How much longer than its grace a worker may take to end before it is killed."""

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT)
_CONTEXT: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """What one worker is given.

    Attributes:
        number: From 0 on.
        listeners: One for each worker, on loopback, for what they tell each other; the worker
            accepts on that of its own number.
    """

    number: int
    listeners: Sequence[socket.socket]


Serve = Callable[[WorkerSeat, Callable[[], None]], int]
"""Serves until a signal; calls what it is given once it listens. Returns the exit code."""


class WorkerPool:
    """Starts workers by fork, starts those again that end by themselves, and ends them all on
    SIGTERM or SIGINT.

    It belongs to a process that has no thread and no event loop: a fork would take half of them
    along.

    Args:
        num_workers: How many.
        serve: What each of them does.
        announce: Called once, when all of them listen for the first time.
        grace_s: How long requests in flight may go on, in seconds.
    """

    def __init__(
        self, num_workers: int, serve: Serve, announce: Callable[[], None], grace_s: float
    ) -> None:
        self._num_workers = num_workers
        self._serve = serve
        self._announce = announce
        self._grace_s = grace_s
        self._processes: dict[int, ForkProcess] = {}
        self._starting: dict[int, connection.Connection] = {}
        self._due: dict[int, float] = {}
        self._announced = False

    def run(self) -> int:
        """Run until a signal, or until a worker cannot start.

        Returns:
            0 after a graceful end, 1 when a worker had to be killed, what a worker ended with that
            could not start for the first time, 128 and the signal's number after a second signal.
        """
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(self._num_workers)]
        with _signals() as signals:
            try:
                for number in range(self._num_workers):
                    self._start(WorkerSeat(number, listeners))
                while True:
                    pauses = [at - time.monotonic() for at in self._due.values()]
                    self._wait(signals, max(min(pauses), 0.0) if pauses else None)
                    if _arrived(signals):
                        return self._stop(signals)
                    code = self._reap()
                    if code is not None:
                        self._stop(signals)
                        return code
                    self._note_ready()
                    for number in [
                        number for number, at in self._due.items() if at <= time.monotonic()
                    ]:
                        del self._due[number]
                        self._start(WorkerSeat(number, listeners))
            finally:
                for process in self._processes.values():
                    process.kill()
                for listener in listeners:
                    listener.close()

    def _start(self, seat: WorkerSeat) -> None:
        ready, tell = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_work, args=(self._serve, seat, tell), name=f"worker-{seat.number}"
        )
        process.start()
        tell.close()
        self._processes[seat.number] = process
        self._starting[seat.number] = ready

    def _wait(self, signals: socket.socket, timeout_s: float | None) -> None:
        sentinels = [process.sentinel for process in self._processes.values()]
        connection.wait([signals, *sentinels, *self._starting.values()], timeout_s)

    def _note_ready(self) -> None:
        for number, ready in list(self._starting.items()):
            if ready.poll():
                del self._starting[number]
                ready.close()
        if not self._starting and not self._due and not self._announced:
            self._announced = True
            self._announce()

    def _reap(self) -> int | None:
        """Have those started again that ended.

        Returns:
            What a worker ended with if that is no use: one has not come up the first time.
        """
        for number, process in list(self._processes.items()):
            if process.exitcode is None:
                continue
            process.join()
            del self._processes[number]
            ready = self._starting.pop(number, None)
            if ready is not None:
                ready.close()
                if not self._announced:
                    return process.exitcode or 1
            logger.error(
                "worker %d ended with %s; another one takes its place", number, process.exitcode
            )
            self._due[number] = time.monotonic() + RESTART_PAUSE_S
        return None

    def _stop(self, signals: socket.socket) -> int:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + self._grace_s + STOP_MARGIN_S
        code = 0
        # Asked once a round: one that ends in between must not be left out of the wait that it
        # would have ended.
        while sentinels := [
            process.sentinel for process in self._processes.values() if process.exitcode is None
        ]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                logger.error("a worker does not end; it is killed")
                return 1
            connection.wait([signals, *sentinels], left_s)
            number = _arrived(signals)
            if number:
                return 128 + number
        for process in self._processes.values():
            code = code or abs(process.exitcode or 0)
        return code


def _work(serve: Serve, seat: WorkerSeat, tell: connection.Connection) -> None:
    """A worker's life. It ends with its parent, also when that is killed."""
    signal.set_wakeup_fd(-1)
    for handled in _HANDLED:
        signal.signal(handled, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()

    def ready() -> None:
        tell.send_bytes(b"ready")
        tell.close()

    sys.exit(serve(seat, ready))


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that a byte arrives at for each signal, while this process itself goes on."""
    received, written = socket.socketpair()
    received.setblocking(False)
    written.setblocking(False)
    before = {number: signal.signal(number, _pass) for number in _HANDLED}
    wakeup = signal.set_wakeup_fd(written.fileno())
    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        received.close()
        written.close()


def _pass(number: int, frame: object) -> None:
    """Taken note of through the wakeup descriptor."""


def _arrived(signals: socket.socket) -> int:
    """The number of a signal that has arrived, 0 for none."""
    readable, _, _ = select.select([signals], [], [], 0)
    return signals.recv(1)[0] if readable else 0
