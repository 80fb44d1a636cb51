"""Work side by side: all of it ends with the call, whatever becomes of one piece."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from lmcache_core.concurrency import run_together, supervisor
from lmcache_core.errors import UnavailableError


class Work:
    """Pieces of work that note how they end."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.both = asyncio.Barrier(2)

    async def meet(self, name: str) -> None:
        await self.both.wait()
        self.ended.append(name)

    async def last(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # what it gives back takes a while
            self.ended.append(name)

    async def fail(self, name: str) -> None:
        await asyncio.sleep(0)
        raise UnavailableError(name)


async def test_they_run_at_once() -> None:
    work = Work()
    async with asyncio.timeout(5):
        await run_together(work.meet(name) for name in ("a", "b"))
    assert sorted(work.ended) == ["a", "b"]


async def test_nothing_to_do_is_done() -> None:
    await run_together([])


async def test_a_failure_is_raised_when_all_the_others_have_ended() -> None:
    work = Work()
    async with asyncio.timeout(5):
        with pytest.raises(UnavailableError, match="first"):
            await run_together([work.last("a"), work.fail("first"), work.last("b")])
    assert sorted(work.ended) == ["a", "b"]


async def test_a_piece_that_ignores_its_cancellation_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_WAIT_S", 0.2)
    let_go = asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    work = Work()
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="first"):
            await run_together([stubborn(), work.fail("first"), work.last("b")])
    assert work.ended == ["b"]
    [record] = caplog.records
    assert "stubborn" in record.getMessage()
    let_go.set()


@pytest.mark.parametrize("num_turns", [1, 3])
async def test_cancelled_it_leaves_nothing_behind(num_turns: int) -> None:
    work = Work()
    running = asyncio.ensure_future(run_together([work.last("a"), work.last("b")]))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.ended == ([] if num_turns < 3 else ["a", "b"])
    assert asyncio.all_tasks() == {asyncio.current_task()}
