"""Several processes that serve one port: a parent that only manages them, and the metrics of all of
them, available from each.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

RESTART_PAUSE_S: Final = 1.0
STOP_MARGIN_S: Final = 10.0
"""How much longer than its grace period a worker may take to end before it is killed."""
START_LOOK_S: Final = 0.05
"""How often the parent checks whether all workers listen."""

_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_CONTEXT: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """The arguments of one worker.

    Attributes:
        number: Its number, from 0.
        listeners: One per worker, on loopback, for communication between workers; the worker
            accepts on the one with its own number.
    """

    number: int
    listeners: Sequence[socket.socket]


Serve = Callable[[WorkerSeat, Callable[[], None]], int]
"""Serves until a signal; calls its argument once it listens. Returns the exit code."""


class WorkerPool:
    """Starts workers by fork, restarts those that end by themselves, and ends them all on SIGTERM
    or SIGINT.

    It belongs to a process without threads and event loop, which a fork would copy only in part.
    Signals are blocked in the parent while it runs, and waited for.

    Args:
        num_workers: Number of workers.
        serve: Function of each worker.
        announce: Called once, when all of them listen for the first time.
        grace_s: How long requests in flight may continue, in seconds.
    """

    def __init__(
        self, num_workers: int, serve: Serve, announce: Callable[[], None], grace_s: float
    ) -> None:
        self._num_workers = num_workers
        self._serve = serve
        self._announce = announce
        self._grace_s = grace_s
        self._processes: dict[int, ForkProcess] = {}
        # Shared with the workers: each sets its own byte once it listens.
        self._listening = mmap.mmap(-1, num_workers)
        self._due: dict[int, float] = {}
        self._announced = False

    def run(self) -> int:
        """Run until a signal, or until a worker cannot start.

        Returns:
            0 after a graceful end, 1 if a worker had to be killed, the exit code of a worker that
                failed to start the first time, 128 and the signal's number after a second signal.
        """
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(self._num_workers)]
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, signal.SIGCHLD})
        self._due = dict.fromkeys(range(self._num_workers), 0.0)
        try:
            while True:
                for number in [n for n, at in self._due.items() if at <= time.monotonic()]:
                    del self._due[number]
                    self._start(WorkerSeat(number, listeners), unblocked)
                if not self._announced and all(self._listening[:]):
                    self._announced = True
                    self._announce()
                pauses = [at - time.monotonic() for at in self._due.values()]
                if not self._announced:
                    pauses.append(START_LOOK_S)
                if _wait(min(pauses, default=None)):
                    return self._stop()
                code = self._reap()
                if code is not None:
                    self._stop()
                    return code
        finally:
            for process in self._processes.values():
                process.kill()
            for listener in listeners:
                listener.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def _start(self, seat: WorkerSeat, unblocked: Iterable[int]) -> None:
        def ready() -> None:
            self._listening[seat.number] = 1

        self._listening[seat.number] = 0
        process = _CONTEXT.Process(
            target=_work, args=(self._serve, seat, ready, unblocked), name=f"worker-{seat.number}"
        )
        process.start()
        self._processes[seat.number] = process

    def _reap(self) -> int | None:
        """Restart workers that have ended.

        Returns:
            The exit code of a worker that failed its first start; None: continue.
        """
        for number, process in list(self._processes.items()):
            if process.exitcode is None:
                continue
            del self._processes[number]
            if not self._announced and not self._listening[number]:
                return process.exitcode or 1
            logger.error(
                "worker ended, replacing it: worker=%d exit_code=%s", number, process.exitcode
            )
            self._due[number] = time.monotonic() + RESTART_PAUSE_S
        return None

    def _stop(self) -> int:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + self._grace_s + STOP_MARGIN_S
        while any(process.exitcode is None for process in self._processes.values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                logger.error("worker does not end, killing it: waited_s=%g", self._grace_s)
                return 1
            if number := _wait(left_s):
                return 128 + number
        codes = [abs(process.exitcode or 0) for process in self._processes.values()]
        return next(filter(None, codes), 0)


def _wait(timeout_s: float | None) -> int:
    """Wait for a signal, or until a worker has ended; return the signal's number, 0 for none."""
    waited = {*_ENDING, signal.SIGCHLD}
    arrived = (
        signal.sigwaitinfo(waited)
        if timeout_s is None
        else signal.sigtimedwait(waited, max(timeout_s, 0.0))
    )
    return arrived.si_signo if arrived is not None and arrived.si_signo in _ENDING else 0


def _work(
    serve: Serve, seat: WorkerSeat, ready: Callable[[], None], unblocked: Iterable[int]
) -> None:
    """Serve as a worker, which ends with its parent, even if that is killed."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    sys.exit(serve(seat, ready))


WORKER_UP: Final = "lmcache_worker_up"
LABEL_WORKER: Final = "worker"
SIBLING_TIMEOUT_S: Final = 1.0
MAX_SIBLING_BYTES: Final = 16 << 20


class WorkerMetrics:
    """Serves a worker's metrics to its siblings, and collects theirs.

    Args:
        registry: The worker's own metrics.
        seat: Its number, and the addresses of the others.
    """

    def __init__(self, registry: CollectorRegistry, seat: WorkerSeat) -> None:
        self._registry = registry
        self._seat = seat
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Start answering siblings."""
        self._server = await asyncio.start_server(
            self._answer, sock=self._seat.listeners[self._seat.number].dup()
        )

    async def close(self) -> None:
        """Stop answering siblings."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def gather(self) -> bytes:
        """Return the metrics of all workers, in Prometheus' text format; one that does not answer
        in time is shown as not up.
        """
        numbers = range(len(self._seat.listeners))
        texts = await asyncio.gather(*(self._text_of(number) for number in numbers))
        merged = CollectorRegistry()
        merged.register(
            _Merged({str(number): text for number, text in zip(numbers, texts, strict=True)})
        )
        return generate_latest(merged)

    async def _text_of(self, number: int) -> str | None:
        if number == self._seat.number:
            return generate_latest(self._registry).decode()
        try:
            async with asyncio.timeout(SIBLING_TIMEOUT_S):
                return await _ask(self._seat.listeners[number].getsockname()[:2])
        except (OSError, TimeoutError, ValueError) as exc:
            logger.warning(
                "no metrics from a worker: worker=%d error=%s", number, type(exc).__name__
            )
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer every connection with the same metrics as `/metrics`."""
        try:
            async with asyncio.timeout(SIBLING_TIMEOUT_S):
                writer.write(generate_latest(self._registry))
                await writer.drain()
        except (OSError, TimeoutError) as exc:
            logger.debug("metrics not sent: error=%s", type(exc).__name__)
        finally:
            writer.close()


async def _ask(address: Sequence[object]) -> str:
    reader, writer = await asyncio.open_connection(*address)  # type: ignore[arg-type]
    try:
        data = bytearray()
        while piece := await reader.read(1 << 16):
            data += piece
            if len(data) > MAX_SIBLING_BYTES:
                raise ValueError(f"more than {MAX_SIBLING_BYTES} bytes of metrics")
        return data.decode()
    finally:
        writer.close()


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str | None]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            WORKER_UP, "Whether a worker of this port reports its metrics.", labels=[LABEL_WORKER]
        )
        for worker, text in self._texts.items():
            up.add_metric([worker], text is not None)
        yield up
        yield from self._families()

    def _families(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for worker, text in self._texts.items():
            for family in text_string_to_metric_families(text or ""):
                merged = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, LABEL_WORKER: worker})
                    for sample in family.samples
                ]
        yield from found.values()
