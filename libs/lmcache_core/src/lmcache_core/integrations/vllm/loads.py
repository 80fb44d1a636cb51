"""Asynchronous loads: one thread, a bounded queue, results that its owner takes."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_core.integrations.vllm.plan import Load

logger = logging.getLogger(__name__)

MAX_WAITING_LOADS = 4096
JOIN_S = 10.0


@dataclass(frozen=True)
class LoadResult:
    """What became of a load.

    Attributes:
        request_id: Whose.
        bad_blocks: vLLM's blocks that do not hold what they should; empty when all is well.
        is_good: Whether everything was loaded.
    """

    request_id: str
    bad_blocks: frozenset[int]
    is_good: bool


class LoadThread:
    """Runs loads one after the other.

    Args:
        load: Does one; may raise nothing.
        refuse: Gives the result of a load that is not tried.
    """

    def __init__(
        self, load: Callable[[Load], LoadResult], refuse: Callable[[Load], LoadResult]
    ) -> None:
        self._load = load
        self._refuse = refuse
        self._waiting: queue.Queue[Load | None] = queue.Queue(MAX_WAITING_LOADS)
        self._lock = threading.Lock()
        self._has_changed = threading.Condition(self._lock)
        self._num_underway = 0
        self._results: list[LoadResult] = []
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-loads", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End after the load that runs; those that wait are refused. Idempotent.

        A load that does not end within `JOIN_S` is left to its thread, which ends with the process.
        """
        if self._thread.is_alive() and not self._is_closing.is_set():
            self._is_closing.set()
            with contextlib.suppress(queue.Full):  # then the thread has something to wake up for
                self._waiting.put_nowait(None)
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.error(
                    "load did not end, leaving it: thread=%s waited_s=%g", self._thread.name, JOIN_S
                )

    def submit(self, load: Load) -> None:
        """Have a load done; beyond `MAX_WAITING_LOADS` it is refused."""
        with self._lock:
            self._num_underway += 1
        try:
            self._waiting.put_nowait(load)
        except queue.Full:
            logger.warning(
                "too many loads wait, recomputing: request=%s limit=%d",
                load.request_id,
                MAX_WAITING_LOADS,
            )
            self._done(self._refuse(load))

    def refuse(self, load: Load) -> None:
        """A load that is not tried."""
        with self._lock:
            self._num_underway += 1
        self._done(self._refuse(load))

    def wait(self, limit_s: float) -> None:
        """Wait until there is something to take, or nothing that it could come from; at most so
        long.
        """
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._results or not self._num_underway, limit_s)

    def take_results(self) -> list[LoadResult]:
        """What has ended since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def _run(self) -> None:
        while (load := self._waiting.get()) is not None:
            self._done(self._refuse(load) if self._is_closing.is_set() else self._load(load))
            if self._is_closing.is_set() and self._waiting.empty():
                return

    def _done(self, result: LoadResult) -> None:
        with self._has_changed:
            self._results.append(result)
            self._num_underway -= 1
            self._has_changed.notify_all()
