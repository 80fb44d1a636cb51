"""The steps of a drain, in order, and calls of it that overlap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_node.drain import ChunkHandover, DrainProgress, DrainState, NodeDrain

from tests.fixtures.waiting import until


@dataclass
class Receiver(ChunkHandover):
    """Takes `takes` of five chunks at each call, and notes what it was asked."""

    takes: int = 5
    has_takers: bool = True
    writing_share: float = 0.5
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[str] = field(default_factory=list)
    error: Exception | None = None

    def count(self) -> int:
        self.calls.append("count")
        return 5

    async def run(self, progress: DrainProgress, deadline: float) -> None:
        self.calls.append("run")
        assert progress.state is DrainState.HANDING_OVER
        assert deadline - asyncio.get_running_loop().time() > 50
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        progress.handed_over = self.takes

    async def close(self) -> None:
        self.calls.append("close")


def drain_to(receiver: Receiver, on_begin: Callable[[], None] = lambda: None) -> NodeDrain:
    hot = LocalCPUBackend(ArenaAllocator.anonymous(4096), create_policy())
    return NodeDrain(60, TierStack(hot), receiver, on_begin)


async def test_callers_wait_for_the_same_drain() -> None:
    receiver, begun = Receiver(), []
    drain = drain_to(receiver, lambda: begun.append(drain.has_begun))
    assert not drain.has_begun
    asked = [asyncio.create_task(drain.run()) for _ in range(3)]
    await drain.counted()
    assert (drain.progress.total, drain.progress.left) == (5, 5)
    receiver.gate.set()
    await asyncio.gather(*asked)
    assert begun == [True]
    assert drain.progress == DrainProgress(5, 5, state=DrainState.DONE)
    await drain.run()
    assert receiver.calls == ["count", "run", "close"]


async def test_incomplete_drain_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    receiver = Receiver(takes=3)
    receiver.gate.set()
    drain = drain_to(receiver)
    await drain.run()
    assert (drain.progress.left, drain.is_complete) == (2, False)
    receiver.takes = 5
    await drain.run()
    assert drain.is_complete
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


async def test_without_receivers_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    receiver = Receiver(takes=0, has_takers=False)
    receiver.gate.set()
    drain = drain_to(receiver)
    await drain.run()
    assert drain.progress.left == 5
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("end", ["closed", "failed"])
async def test_drain_that_is_closed_or_fails_is_done(end: str) -> None:
    receiver = Receiver(error=ValueError("unforeseen"))
    drain = drain_to(receiver)
    asked = asyncio.create_task(drain.run())
    await drain.counted()
    if end == "failed":
        receiver.gate.set()
    else:
        await drain.close()
    async with asyncio.timeout(60):
        await asked
    assert receiver.calls[-1] == "close" or end == "closed"
    assert drain.progress.state is DrainState.DONE
    await drain.close()
    async with asyncio.timeout(60):
        await drain.run()


async def test_cancelled_drain_accepts_chunks_again_and_may_begin_again() -> None:
    receiver, events = Receiver(), []
    hot = LocalCPUBackend(ArenaAllocator.anonymous(4096), create_policy())
    drain = NodeDrain(
        60,
        TierStack(hot),
        receiver,
        lambda: events.append("begun"),
        lambda: events.append("cancelled"),
    )
    await drain.cancel()
    assert events == [], "there is nothing to cancel"
    waiting = [asyncio.create_task(drain.run()), asyncio.create_task(drain.counted())]
    await until(lambda: "run" in receiver.calls)
    await drain.cancel()
    await asyncio.gather(*waiting)
    assert (events, drain.has_begun) == (["begun", "cancelled"], False)
    assert drain.progress == DrainProgress()
    receiver.gate.set()
    await drain.run_last()
    assert drain.progress == DrainProgress(5, 5, state=DrainState.DONE)
    await drain.cancel()
    assert drain.has_begun, "the process ends"
    assert events == ["begun", "cancelled", "begun"]


async def test_a_drain_cancelled_before_its_first_step_releases_its_waiters() -> None:
    drain = drain_to(Receiver())
    asked = [asyncio.create_task(drain.run()), asyncio.create_task(drain.cancel())]
    async with asyncio.timeout(60):
        await asyncio.gather(*asked)
    assert not drain.has_begun


class SlowToClose(Receiver):
    """Closes its clients only when the gate opens."""

    async def run(self, progress: DrainProgress, deadline: float) -> None:
        self.calls.append("run")
        if not self.gate.is_set():
            await asyncio.Event().wait()

    async def close(self) -> None:
        await self.gate.wait()
        self.calls.append("close")


async def test_a_new_drain_opens_no_client_that_the_cancelled_one_closes() -> None:
    receiver = SlowToClose()
    drain = drain_to(receiver)
    drain.begin()
    await until(lambda: "run" in receiver.calls)
    cancelled = asyncio.create_task(drain.cancel())
    await until(lambda: not drain.has_begun)
    again = asyncio.create_task(drain.run())
    await drain.counted()
    for _ in range(100):
        await asyncio.sleep(0)
    receiver.gate.set()
    async with asyncio.timeout(60):
        await asyncio.gather(again, cancelled)
    assert receiver.calls == ["count", "run", "count", "close", "run", "close"]
