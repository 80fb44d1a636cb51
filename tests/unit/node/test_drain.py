"""The order of a drain, its bound, and what asking twice does, whoever takes the chunks."""

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


async def test_all_who_ask_wait_for_the_same_drain_and_it_begins_once() -> None:
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
    assert receiver.calls == ["count", "run", "close"], "it has left nothing to try again"


async def test_one_that_left_something_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_without_receivers_what_stays_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    receiver = Receiver(takes=0, has_takers=False)
    receiver.gate.set()
    drain = drain_to(receiver)
    await drain.run()
    assert drain.progress.left == 5
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("end", ["closed", "failed"])
async def test_one_that_is_broken_off_is_over(end: str) -> None:
    receiver = Receiver(error=ValueError("unforeseen"))
    drain = drain_to(receiver)
    asked = asyncio.create_task(drain.run())
    await drain.counted()
    if end == "failed":
        receiver.gate.set()
    else:
        await drain.close()
    async with asyncio.timeout(9):
        await asked
    assert receiver.calls[-1] == "close" or end == "closed"
    assert drain.progress.state is DrainState.DONE
    await drain.close()
    async with asyncio.timeout(9):
        await drain.run()  # nothing runs any more, and nobody waits


async def test_a_cancelled_drain_takes_chunks_again_and_may_begin_once_more() -> None:
    receiver, told = Receiver(), []
    hot = LocalCPUBackend(ArenaAllocator.anonymous(4096), create_policy())
    drain = NodeDrain(
        60, TierStack(hot), receiver, lambda: told.append("begun"), lambda: told.append("cancelled")
    )
    await drain.cancel()
    assert told == [], "there is nothing to cancel"
    waiting = [asyncio.create_task(drain.run()), asyncio.create_task(drain.counted())]
    while "run" not in receiver.calls:
        await asyncio.sleep(0)
    await drain.cancel()
    await asyncio.gather(*waiting)
    assert (told, drain.has_begun) == (["begun", "cancelled"], False)
    assert drain.progress == DrainProgress()
    receiver.gate.set()
    await drain.run_last()
    assert drain.progress == DrainProgress(5, 5, state=DrainState.DONE)
    await drain.cancel()
    assert drain.has_begun, "the process ends"
    assert told == ["begun", "cancelled", "begun"]


async def test_a_drain_cancelled_before_its_first_step_releases_its_waiters() -> None:
    drain = drain_to(Receiver())
    asked = [asyncio.create_task(drain.run()), asyncio.create_task(drain.cancel())]
    async with asyncio.timeout(9):
        await asyncio.gather(*asked)
    assert not drain.has_begun


class SlowToClose(Receiver):
    """Closes its clients only when the gate opens."""

    async def run(self, progress: DrainProgress, deadline: float) -> None:
        self.calls.append("run")
        await asyncio.sleep(0 if self.gate.is_set() else 60)

    async def close(self) -> None:
        await self.gate.wait()
        self.calls.append("close")


async def test_a_new_drain_opens_no_client_that_the_cancelled_one_closes() -> None:
    receiver = SlowToClose()
    drain = drain_to(receiver)
    drain.begin()
    while "run" not in receiver.calls:
        await asyncio.sleep(0)
    cancelled = asyncio.create_task(drain.cancel())
    while drain.has_begun:
        await asyncio.sleep(0)
    again = asyncio.create_task(drain.run())
    await drain.counted()
    for _ in range(100):
        await asyncio.sleep(0)
    receiver.gate.set()
    async with asyncio.timeout(9):
        await asyncio.gather(again, cancelled)
    assert receiver.calls == ["count", "run", "count", "close", "run", "close"]
