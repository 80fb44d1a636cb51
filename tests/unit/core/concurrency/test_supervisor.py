"""Background tasks have an owner that joins them; pieces of work run together end together."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from lmcache_core.concurrency import TaskSupervisor, run_together, supervisor
from lmcache_core.errors import UnavailableError


async def swallow_first(ended: list[str]) -> None:
    """Swallow one cancellation, then wait for the next."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("swallow_first")


async def wait_and_tell(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)  # giving back takes a while
        ended.append("wait_and_tell")


async def test_close_names_and_leaves_a_task_that_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_WAIT_S", 0.2)
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("stubborn", swallow_first(ended))
    tasks.start("good", wait_and_tell(ended))
    await asyncio.sleep(0)
    [stubborn] = [task for task in asyncio.all_tasks() if task.get_name() == "component/stubborn"]
    with caplog.at_level(logging.ERROR, "lmcache_core.concurrency"):
        async with asyncio.timeout(10):
            await tasks.close()
    assert ended == ["wait_and_tell"]
    [record] = caplog.records
    assert "component/stubborn" in record.getMessage()
    assert "good" not in record.getMessage()
    stubborn.cancel()
    await asyncio.wait([stubborn])


async def test_close_joins_what_takes_a_while_to_end(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("good", wait_and_tell(ended))
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["wait_and_tell"]
    assert caplog.records == []


async def test_a_close_that_is_cancelled_while_it_drains_has_cancelled_the_tasks() -> None:
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("good", wait_and_tell(ended))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await tasks.close(drain_s=60)
    async with asyncio.timeout(10):
        while not ended:
            await asyncio.sleep(0.01)


async def test_close_of_nothing_ends_at_once() -> None:
    tasks = TaskSupervisor("component")
    await tasks.close(drain_s=60)
    work = wait_and_tell([])
    assert not tasks.start("late", work)


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
    async with asyncio.timeout(9):
        await run_together(work.meet(name) for name in ("a", "b"))
    assert sorted(work.ended) == ["a", "b"]


async def test_nothing_to_do_is_done() -> None:
    await run_together([])


async def test_a_failure_is_raised_when_all_the_others_have_ended() -> None:
    work = Work()
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
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
