"""The end of a server: it takes nothing new, writes what it has taken, and hands its chunks to
the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.storage.stack import TierStack

from lmcache_storage.handover.held import HeldChunks
from lmcache_storage.handover.mover import Mover, Sized
from lmcache_storage.handover.neighbours import Neighbours
from lmcache_storage.handover.progress import DrainState, Moved

logger = logging.getLogger(__name__)

WRITING_SHARE = 0.25
"""Of the time, for writes that were underway, where there is somebody to hand chunks to."""
EVICTING_SHARE = 0.5
"""Of the bytes, the hottest: for these others may be given up at their new homes. The rest goes
where there is room.
"""


class Drain:
    """One server's drain. Whoever asks for it while it runs waits for the same one; when it has
    left something, the next one tries again.

    Args:
        timeout_s: Longest time that it takes.
        stack: Whose writes are finished.
        chunks: What there is.
        neighbours: Who takes it; None: nobody.
        mover: Sends it; None: nobody.
    """

    def __init__(
        self,
        timeout_s: float,
        stack: TierStack,
        chunks: HeldChunks,
        neighbours: Neighbours | None,
        mover: Mover | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._stack = stack
        self._chunks = chunks
        self._neighbours = neighbours
        self._mover = mover
        self._tasks = TaskSupervisor("drain", max_tasks=2)
        self._before: list[Callable[[], None]] = []
        self._ended: asyncio.Event | None = None
        self.state = DrainState.SERVING
        self.moved = Moved()

    def when_it_begins(self, callback: Callable[[], None]) -> None:
        """Call this, once, when the first drain begins."""
        self._before.append(callback)

    def begin(self) -> None:
        """Drain in the background, if that is not being done or has been done."""
        if self._ended is None or (self._ended.is_set() and not self.is_complete):
            is_first, self._ended = self._ended is None, asyncio.Event()
            for callback in self._before if is_first else ():
                callback()
            self.state = DrainState.WRITING
            if not self._tasks.start("drain", self._work(self._ended)):
                self._end(self._ended)

    async def run(self) -> None:
        """Drain, for up to `timeout_s` seconds. Never raises for what it could not do: see
        `moved`.
        """
        self.begin()
        if self._ended is not None:
            await self._ended.wait()

    async def close(self) -> None:
        """Break off what runs. Idempotent."""
        await self._tasks.close()

    @property
    def is_complete(self) -> bool:
        """Whether the last drain has left nothing that somebody could have taken."""
        return (
            self.state is DrainState.DONE
            and not self.moved.left
            and not self.moved.failed
            and not self._stack.is_writing
        )

    async def _work(self, ended: asyncio.Event) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._timeout_s
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await self._stack.drain(
                    self._timeout_s * (1 if self._mover is None else WRITING_SHARE)
                )
                if self._mover is not None and self._neighbours is not None:
                    self.state = DrainState.HANDING_OVER
                    await self._neighbours.refresh()
                    await self._hand_over(self._mover)
                    await self._stack.drain(max(0.0, deadline - now()))
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._end(ended)

    async def _hand_over(self, mover: Mover) -> None:
        wanted = await asyncio.to_thread(self._chunks.hottest_first)
        self.moved = Moved(len(wanted))
        num_evicting = await asyncio.to_thread(num_hottest, wanted, EVICTING_SHARE)
        await mover.run(wanted, num_evicting, self.moved)

    def _end(self, ended: asyncio.Event) -> None:
        self.state = DrainState.DONE
        ended.set()
        moved = self.moved
        is_loss = moved.left or moved.failed or self._stack.is_writing
        logger.log(
            logging.WARNING if is_loss else logging.INFO,
            "drained: %d chunks, %d of them handed over, %d there already, %d refused, %d left; %d"
            " bytes and %d more chunks not written",
            moved.total,
            moved.handed_over,
            moved.already_elsewhere,
            moved.failed,
            moved.left,
            self._stack.num_pending_bytes,
            self._stack.num_waiting_names,
        )


def num_hottest(wanted: Sequence[Sized], share: float) -> int:
    """How many chunks, from the first on, make up that share of all bytes."""
    enough = share * sum(size for _, size in wanted)
    num_bytes = 0
    for i, (_, size) in enumerate(wanted):
        if num_bytes >= enough:
            return i
        num_bytes += size
    return len(wanted)
