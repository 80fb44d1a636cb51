"""The drain: from "no new stores" to "nothing is lost that somebody could take", within a bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics
from lmcache_sidecar.handover.handover import Handover
from lmcache_sidecar.handover.progress import DrainProgress, DrainState

logger = logging.getLogger(__name__)

WRITING_SHARE = 0.5
"""Of the time, for writes that were underway, where there is somebody to hand chunks to."""


class Drain:
    """One sidecar's drain. Whoever asks for it while it runs waits for the same one; when it has
    left something, the next one tries again.

    Args:
        timeout_s: Longest time that it takes.
        stack: Whose writes are finished.
        handover: What comes then.
        tasks: Owns the work, so that it goes on when whoever asked has left.
        counters: What was left, under the names of `lmcache_sidecar.metrics`.
    """

    def __init__(
        self,
        timeout_s: float,
        stack: TierStack,
        handover: Handover,
        tasks: TaskSupervisor,
        counters: Counters,
    ) -> None:
        self._timeout_s = timeout_s
        self._stack = stack
        self._handover = handover
        self._tasks = tasks
        self._counters = counters
        self._before: list[Callable[[], None]] = []
        self._ended: asyncio.Event | None = None
        self._counted = asyncio.Event()
        self.progress = DrainProgress()

    @property
    def has_begun(self) -> bool:
        """Whether this sidecar is on its way to its end: it takes nothing new any more."""
        return self._ended is not None

    def when_it_begins(self, callback: Callable[[], None]) -> None:
        """Call this, once, when the first drain begins."""
        self._before.append(callback)

    def begin(self) -> None:
        """Drain in the background, for up to `timeout_s` seconds, if that is not being done or
        has been done.
        """
        if self._ended is None or (self._ended.is_set() and not self._is_complete):
            is_first, self._ended = self._ended is None, asyncio.Event()
            if is_first:
                for callback in self._before:
                    callback()
            progress = self.progress = DrainProgress(DrainState.WRITING, 0)
            if not self._tasks.start("drain", self._drain(progress, self._ended)):
                progress.state = DrainState.DONE
                self._ended.set()
                self._counted.set()

    async def counted(self) -> None:
        """Wait until it is known how many chunks there are; not for the drain."""
        await self._counted.wait()

    async def run(self) -> None:
        """Drain, for up to `timeout_s` seconds. Never raises for what it could not do: see
        `progress`.
        """
        self.begin()
        if self._ended is not None:
            await self._ended.wait()

    @property
    def _is_complete(self) -> bool:
        return not self.progress.left and not self.progress.failed and not self._stack.is_writing

    async def _drain(self, progress: DrainProgress, ended: asyncio.Event) -> None:
        try:
            progress.total = await asyncio.to_thread(self._handover.count)
            self._counted.set()
            await self._work(progress)
        finally:
            self._counted.set()
            progress.state = DrainState.DONE
            ended.set()

    async def _work(self, progress: DrainProgress) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._timeout_s
        try:
            await self._stack.drain(
                self._timeout_s * (WRITING_SHARE if self._handover.has_takers else 1)
            )
            progress.state = DrainState.HANDING_OVER
            await self._handover.run(progress, deadline)
            await self._stack.drain(max(0.0, deadline - now()))
        finally:
            await self._handover.close()
        self._counters.add(metrics.DRAINED_CHUNKS_TOTAL, progress.left, "left")
        is_loss = self._stack.is_writing or (
            self._handover.has_takers and (progress.left or progress.failed)
        )  # with nobody to take them, chunks stay
        logger.log(
            logging.WARNING if is_loss else logging.INFO,
            "drained: %d chunks, %d of them handed over, %d elsewhere already, %d refused, %d left;"
            " %d bytes and %d more chunks not written",
            progress.total,
            progress.handed_over,
            progress.already_elsewhere,
            progress.failed,
            progress.left,
            self._stack.num_pending_bytes,
            self._stack.num_waiting_names,
        )
