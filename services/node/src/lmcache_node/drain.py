"""The drain of a node: it accepts no new chunks, finishes its writes, and hands over its chunks
within a time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.storage.stack import TierStack

logger = logging.getLogger(__name__)


class DrainState(StrEnum):
    """The stages of a drain."""

    SERVING = "serving"
    WRITING = "writing"
    """No new chunks are accepted; pending writes to the slower tiers are finished."""
    HANDING_OVER = "handing_over"
    DONE = "done"


@dataclass(slots=True)
class MoveProgress:
    """Progress of moving chunks to other nodes. `total` is the sum of the other four.

    Attributes:
        total: Chunks to move.
        handed_over: Sent, and stored by the receiver.
        already_elsewhere: Already held by a receiver or another node.
        failed: Unreadable, or accepted by no receiver.
    """

    total: int = 0
    handed_over: int = 0
    already_elsewhere: int = 0
    failed: int = 0

    @property
    def left(self) -> int:
        """Chunks that were not processed, so far or in time."""
        return self.total - self.handed_over - self.already_elsewhere - self.failed


@dataclass(slots=True)
class DrainProgress(MoveProgress):
    """Progress of one drain."""

    state: DrainState = DrainState.SERVING


class ChunkHandover(Protocol):
    """Hands over the chunks of a node.

    Attributes:
        has_takers: Whether there may be a receiver. Without one, chunks that stay are not lost.
        writing_share: Share of a drain's time for pending writes, if there are receivers.
    """

    has_takers: bool
    writing_share: float

    def count(self) -> int:
        """Return the number of chunks, shown from the beginning of the drain; 0 if `run` sets it.
        Called in a thread.
        """

    async def run(self, progress: DrainProgress, deadline: float) -> None:
        """Hand over chunks until none is left, or until `deadline` on the loop's clock.

        Args:
            progress: Updated along the way.
            deadline: Work underway at this time is abandoned.
        """

    async def close(self) -> None:
        """Close the connections that `run` opened. Idempotent."""


class NodeDrain:
    """The drain of one node. A call during a drain waits for that drain; after an incomplete drain
    the next call tries again.

    Args:
        stack: The tiers whose writes are finished.
        handover: Runs after the writes.
        on_begin: Called when the node stops accepting new chunks.
        on_cancel: Called when it accepts new chunks again.

    Attributes:
        progress: Progress of the current or the last drain.
        is_last: Whether the process ends after it, so that it cannot be cancelled.
    """

    def __init__(
        self,
        timeout_s: float,
        stack: TierStack,
        handover: ChunkHandover,
        on_begin: Callable[[], None] = lambda: None,
        on_cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._stack = stack
        self._handover = handover
        # Separate tasks: a drain outlives the request that started it.
        self._tasks = TaskSupervisor("drain", max_tasks=2)
        self._on_begin = on_begin
        self._on_cancel = on_cancel
        # A cancelled drain closes the handover's connections before the next one opens any.
        self._handing_over = asyncio.Lock()
        self._ended: asyncio.Event | None = None
        self._counted = asyncio.Event()
        self.progress = DrainProgress()
        self.is_last = False

    @property
    def has_begun(self) -> bool:
        """Return whether the node has stopped accepting chunks."""
        return self._ended is not None

    @property
    def is_complete(self) -> bool:
        """Return whether the last drain wrote and handed over everything."""
        return not self.progress.left and not self.progress.failed and not self._stack.is_writing

    def begin(self) -> None:
        """Drain in the background, unless a drain is running or has completed."""
        if self._ended is not None and (not self._ended.is_set() or self.is_complete):
            return
        is_first, self._ended = self._ended is None, asyncio.Event()
        if is_first:
            self._on_begin()
        self.progress = DrainProgress(state=DrainState.WRITING)
        if not self._tasks.start("drain", self._drain(self.progress, self._ended)):
            self._end(self.progress, self._ended)

    async def counted(self) -> None:
        """Wait until the number of chunks is known, not until they are handed over."""
        await self._counted.wait()

    async def run(self) -> None:
        """Drain, for up to `timeout_s` seconds. `progress` shows what was left."""
        self.begin()
        assert self._ended is not None
        await self._ended.wait()

    async def run_last(self) -> None:
        """Drain because the process ends."""
        self.is_last = True
        await self.run()

    async def cancel(self) -> None:
        """End a drain, running or done, and accept new chunks again. Chunks that were handed over
        also stay there. Does nothing without a drain.
        """
        if self._ended is None or self.is_last:
            return
        logger.info("drain cancelled: state=%s left=%d", self.progress.state, self.progress.left)
        self._counted.set()  # for callers that wait
        self._ended.set()  # a task that is cancelled before its first step would not
        # Another drain may begin while this one is joined.
        tasks, self._tasks = self._tasks, TaskSupervisor("drain", max_tasks=2)
        self._ended, self._counted = None, asyncio.Event()
        self.progress = DrainProgress()
        self._on_cancel()
        await tasks.close()

    async def close(self) -> None:
        """Cancel a running drain. Idempotent."""
        await self._tasks.close()

    async def _drain(self, progress: DrainProgress, ended: asyncio.Event) -> None:
        handover, now = self._handover, asyncio.get_running_loop().time
        try:
            progress.total = await asyncio.to_thread(handover.count)
            self._counted.set()
            deadline = now() + self._timeout_s
            await self._stack.drain(
                self._timeout_s * (handover.writing_share if handover.has_takers else 1)
            )
            async with self._handing_over:
                progress.state = DrainState.HANDING_OVER
                try:
                    await handover.run(progress, deadline)
                finally:
                    await handover.close()
            await self._stack.drain(max(0.0, deadline - now()))
        finally:
            self._end(progress, ended)

    def _end(self, progress: DrainProgress, ended: asyncio.Event) -> None:
        progress.state = DrainState.DONE
        ended.set()
        if ended is not self._ended:  # it was cancelled
            return
        self._counted.set()
        is_loss = self._stack.is_writing or (
            self._handover.has_takers and (progress.left or progress.failed)
        )
        logger.log(
            logging.WARNING if is_loss else logging.INFO,
            "drained: chunks=%d handed_over=%d already_elsewhere=%d refused=%d left=%d"
            " unwritten_bytes=%d unwritten_chunks=%d",
            progress.total,
            progress.handed_over,
            progress.already_elsewhere,
            progress.failed,
            progress.left,
            self._stack.num_pending_bytes,
            self._stack.num_waiting_names,
        )
