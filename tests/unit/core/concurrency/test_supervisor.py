"""Background tasks have an owner that joins them; pieces of work run together end together."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from lmcache_core.concurrency import TaskSupervisor, run_together
from lmcache_core.errors import UnavailableError

pytestmark = pytest.mark.virtual_time


async def ignore_first_cancellation(ended: list[str]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("stubborn")


async def end_slowly(ended: list[str], name: str = "good") -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(1.0)
        ended.append(name)


async def fail(name: str) -> None:
    await asyncio.sleep(0)
    raise UnavailableError(name)


async def test_close_names_and_leaves_a_task_that_ignores_its_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("stubborn", ignore_first_cancellation(ended))
    tasks.start("good", end_slowly(ended))
    await asyncio.sleep(0)
    [stubborn] = [task for task in asyncio.all_tasks() if task.get_name() == "component/stubborn"]
    with caplog.at_level(logging.ERROR, "lmcache_core.concurrency"):
        await tasks.close()
    assert ended == ["good"]
    [record] = caplog.records
    assert "component/stubborn" in record.getMessage()
    stubborn.cancel()
    await asyncio.wait([stubborn])


async def test_close_that_is_cancelled_while_it_drains_has_cancelled_the_tasks() -> None:
    ended: list[str] = []
    tasks = TaskSupervisor("component")
    tasks.start("good", end_slowly(ended))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0):
            await tasks.close(drain_s=60)
    await asyncio.sleep(2.0)
    assert ended == ["good"]


async def test_failure_is_raised_when_all_others_have_ended() -> None:
    ended: list[str] = []
    with pytest.raises(UnavailableError, match="first"):
        await run_together([end_slowly(ended, "a"), fail("first"), end_slowly(ended, "b")])
    assert sorted(ended) == ["a", "b"]


@pytest.mark.parametrize("num_turns", [1, 3])
async def test_cancelled_work_leaves_no_task(num_turns: int) -> None:
    ended: list[str] = []
    running = asyncio.ensure_future(run_together([end_slowly(ended, "a"), end_slowly(ended, "b")]))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ([] if num_turns < 3 else ["a", "b"])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closed_supervisor_starts_nothing() -> None:
    tasks = TaskSupervisor("component")
    await tasks.close(drain_s=60)
    assert not tasks.start("late", end_slowly([]))


async def test_work_runs_together() -> None:
    both, ended = asyncio.Barrier(2), list[str]()

    async def meet(name: str) -> None:
        await both.wait()
        ended.append(name)

    async with asyncio.timeout(1.0):
        await run_together(meet(name) for name in ("a", "b"))
    assert sorted(ended) == ["a", "b"]
    await run_together([])
